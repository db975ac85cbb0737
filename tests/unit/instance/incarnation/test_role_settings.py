"""How an instance's role changes its settings."""

from __future__ import annotations

from typing import Any

import pytest

from pdmesh.core.model import Role
from pdmesh.engine.base import EngineInfo
from pdmesh.engine.factory import BuiltEngine
from pdmesh.instance.incarnation.role_settings import capacity_of
from pdmesh.instance.settings import InstanceSettings

INFO = EngineInfo("sim", "m", "f", 64, 1000, 4096, 2048)
ENGINE: Any = None  # not used


@pytest.mark.req("S40", "S53")
@pytest.mark.parametrize(
    ("role", "num_waiting"), [(Role.PREFILL, 0), (Role.FUSION, 0), (Role.DECODE, 3)]
)
def test_only_a_decode_accepts_more_requests_than_it_has_slots(
    role: Role, num_waiting: int
) -> None:
    """A prompt that would have to wait at a prefill is refused: another prefill may be idle."""
    settings = InstanceSettings(num_slots=4, max_waiting=3)
    capacity = capacity_of(settings, role, BuiltEngine(ENGINE, 1 << 20, 1 << 20), INFO)
    assert (capacity.num_slots, capacity.max_waiting) == (4, num_waiting)
