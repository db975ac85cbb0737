"""Before a process is killed, it gets as much time as its drain takes."""

from __future__ import annotations

import pytest

from pdmesh.launcher.spec import STOP_GRACE_S, StopOrder
from pdmesh.services.decode.settings import Settings as DecodeSettings
from pdmesh.services.gateway.settings import Settings as GatewaySettings
from pdmesh.services.prefill.settings import Settings as PrefillSettings


@pytest.mark.fault("F10")
def test_a_process_is_killed_only_after_its_drain_and_its_final_messages() -> None:
    """If a gateway is killed earlier, its streams end without the error event that gives the
    reason.
    """
    assert STOP_GRACE_S[StopOrder.GATEWAY] >= GatewaySettings().drain_s + 2
    for settings in (PrefillSettings(), DecodeSettings()):
        assert STOP_GRACE_S[StopOrder.INSTANCE] >= settings.drain_s + 2
