"""Tests the settings `REQUIRE_RDMA` and `KV_MEMORY` of a simulated instance. An instance must
refuse to start if its machine lacks the required transport or memory.
"""

from __future__ import annotations

import pytest

from pdmesh.core.kv.transfer.gpu_or_host import KvMemory, PathFacts
from pdmesh.core.model import Role
from pdmesh.engine.factory import build_engine
from pdmesh.errors import EngineMisconfigured
from pdmesh.instance.incarnation.role_settings import engine_settings
from pdmesh.instance.settings import InstanceSettings
from pdmesh.kv.device import probe
from pdmesh.kv.device.probe import host_facts

OUTSIDE = "198.51.100.1"  # This is no loopback address. No packet is sent to it.


@pytest.mark.req("S50", "S57")
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"require_rdma": "true"}, "REQUIRE_RDMA is set, but KV is sent to a loopback address"),
        ({"kv_memory": "device"}, "KV_MEMORY is device, but the engine computes on a CPU"),
        ({"require_rdma": "true", "inner_host": OUTSIDE}, "UCX has no RDMA here, only "),
    ],
)
def test_a_path_that_is_not_there_is_refused_in_one_line(
    settings: dict[str, str], says: str
) -> None:
    given = InstanceSettings.model_validate({"engine": "sim", **settings})
    if "inner_host" in settings and host_facts(OUTSIDE).rdma:
        pytest.skip("this machine has RDMA")
    for role in (Role.PREFILL, Role.DECODE, Role.FUSION):
        with pytest.raises(EngineMisconfigured) as refused:
            build_engine(engine_settings(given, role, 1))
        assert refused.value.reason == "KV_NO_TRANSPORT"
        assert says in refused.value.message
        assert "\n" not in refused.value.message


def test_rdma_that_is_there_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    found = PathFacts("cpu", False, frozenset({"tcp", "rc_mlx5"}))
    monkeypatch.setattr(probe, "host_facts", lambda host: found)
    given = InstanceSettings(engine="sim", require_rdma=True, inner_host=OUTSIDE)
    build_engine(engine_settings(given, Role.DECODE, 1))


def test_ucx_that_does_not_start_is_named_in_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "no-such-transport")
    given = InstanceSettings(engine="sim", require_rdma=True, kv_memory=KvMemory.HOST)
    with pytest.raises(EngineMisconfigured, match="UCX does not start: No such device"):
        build_engine(engine_settings(given, Role.PREFILL, 1))
