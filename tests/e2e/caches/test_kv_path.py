"""The memory in which vLLM's KV waits for a transfer.

If a required path for the transfer is missing, the engine does not start.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdmesh.core.kv.transfer.gpu_or_host import KvMemory
from pdmesh.engine.vllm.config import VllmConfig
from pdmesh.errors import EngineMisconfigured
from tests.e2e.pair import running
from tests.fakes.tiny_llama import write_tiny_llama

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
]


def config(model_dir: Path) -> VllmConfig:
    return VllmConfig("prefill-0", 1, model_dir, "tiny", device="cpu", kv_cache_bytes=64 << 20)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.mark.req("S50")
async def test_on_a_cpu_kv_waits_in_the_host_s_memory_and_says_why(model_dir: Path) -> None:
    async with running(config(model_dir)) as host:
        assert host.info.kv_path == "host: the engine computes on a CPU"


@pytest.mark.req("S57")
async def test_required_rdma_that_is_not_there_ends_the_start_in_one_line(model_dir: Path) -> None:
    asked = replace(config(model_dir), requires_rdma=True, kv_memory=KvMemory.DEVICE)
    with pytest.raises(EngineMisconfigured) as refused:
        async with running(asked):
            pass
    assert refused.value.reason == "KV_NO_TRANSPORT"
    assert refused.value.message == (
        "tiny: REQUIRE_RDMA is set, but KV is sent to a loopback address: INNER_HOST (docs/gpu.md)"
    )


@pytest.mark.req("S57")
async def test_ucx_that_does_not_start_ends_the_start_in_one_line(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "no-such-transport")
    with pytest.raises(EngineMisconfigured, match=r"^tiny: UCX does not start: No such device"):
        async with running(config(model_dir)):
            pass


@pytest.mark.req("S57")
async def test_an_instance_that_moves_no_kv_needs_no_path(model_dir: Path) -> None:
    apart = replace(config(model_dir), staging_bytes=0, landing_bytes=0, requires_rdma=True)
    async with running(apart) as host:
        assert host.info.kv_path == ""
