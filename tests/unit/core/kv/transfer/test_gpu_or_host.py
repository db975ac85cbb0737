"""Tests whether KV transfers use GPU or host memory, decided by the features of the machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.kv.transfer.gpu_or_host import (
    KvMemory,
    NoSuchPath,
    PathFacts,
    decide_path,
    transports_of,
)

TCP = frozenset({"self", "tcp", "sysv", "posix", "cma"})
GPU = TCP | {"cuda_copy", "cuda_ipc"}
FABRIC = GPU | {"rc_mlx5", "ud_mlx5", "dc_mlx5", "gdr_copy"}
LAPTOP = PathFacts("cpu", is_local=True, transports=TCP)
CLUSTER = PathFacts(
    "cuda", False, FABRIC, "nvidia_peermem", arena_bytes=512 << 20, free_bytes=2 << 30
)


@pytest.mark.req("S50", "S57")
@pytest.mark.parametrize(
    ("facts", "memory", "reason"),
    [
        (LAPTOP, "host", "the engine computes on a CPU"),
        (replace(LAPTOP, is_local=False), "host", "the engine computes on a CPU"),
        (CLUSTER, "device", "GPUDirect by nvidia_peermem over dc_mlx5, rc_mlx5, ud_mlx5"),
        (replace(CLUSTER, reads_gpu_memory="DMA-BUF"), "device", "GPUDirect by DMA-BUF"),
        (replace(CLUSTER, reads_gpu_memory=""), "host", "nvidia_peermem is not loaded"),
        (replace(CLUSTER, transports=GPU), "host", "UCX has no RDMA here, only cma, cuda_copy"),
        (replace(CLUSTER, transports=GPU, is_local=True), "device", "cuda_ipc between the GPUs"),
        (replace(CLUSTER, transports=TCP), "host", "UCX has no cuda_copy here"),
        (replace(CLUSTER, transports=frozenset()), "host", "only nothing"),
        (
            replace(CLUSTER, is_local=True, transports=TCP | {"cuda_copy"}),
            "host",
            "UCX has no cuda_ipc here, only cma, cuda_copy, posix, self, sysv, tcp",
        ),
        (
            replace(CLUSTER, free_bytes=(512 << 20) - 1),
            "host",
            "the arenas need 512 MiB of the GPU's memory, and 512 MiB are free",
        ),
    ],
)
def test_the_path_is_the_device_where_ucx_reaches_its_memory(
    facts: PathFacts, memory: str, reason: str
) -> None:
    path = decide_path(KvMemory.AUTO, facts, requires_rdma=False)
    assert path.memory == memory
    assert reason in path.reason
    assert str(path) == f"{memory}: {path.reason}"
    assert "\n" not in path.reason
    assert decide_path(KvMemory.HOST, facts, requires_rdma=False).memory is KvMemory.HOST
    if memory == "device":
        assert decide_path(KvMemory.DEVICE, facts, requires_rdma=False) == path
    else:
        with pytest.raises(NoSuchPath, match="KV_MEMORY is device, but ") as refused:
            decide_path(KvMemory.DEVICE, facts, requires_rdma=False)
        assert reason in str(refused.value)


@pytest.mark.req("S57")
@pytest.mark.parametrize(
    ("asked", "facts", "reason"),
    [
        ("auto", CLUSTER, ""),
        ("device", CLUSTER, ""),
        ("host", CLUSTER, ""),  # RDMA from host memory, as the operator asked
        ("host", replace(CLUSTER, reads_gpu_memory=""), ""),
        ("auto", replace(CLUSTER, device="cpu"), ""),  # without a GPU, host memory is no fallback
        ("auto", LAPTOP, "KV is sent to a loopback address"),
        ("auto", replace(LAPTOP, is_local=False), "UCX has no RDMA here, only cma, posix, self"),
        ("host", replace(CLUSTER, transports=GPU), "UCX has no RDMA here"),
        ("auto", replace(CLUSTER, reads_gpu_memory=""), "through host memory: dc_mlx5"),
        ("auto", replace(CLUSTER, transports=FABRIC - {"cuda_copy"}), "UCX has no cuda_copy"),
        ("device", replace(CLUSTER, free_bytes=0), "through host memory: the arenas need 512 MiB"),
    ],
)
def test_required_rdma_makes_the_fallback_an_error_of_one_line(
    asked: str, facts: PathFacts, reason: str
) -> None:
    if not reason:
        decide_path(KvMemory(asked), facts, requires_rdma=True)
        return
    with pytest.raises(NoSuchPath, match=r"^REQUIRE_RDMA is set, but ") as refused:
        decide_path(KvMemory(asked), facts, requires_rdma=True)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_transports_are_read_from_what_ucx_prints() -> None:
    text = """#
# UCP context
#
#     component 0  :  self
#            md 0  :  component 0  self
#
#      resource 0  :  md 0  dev 0  flags -- self/memory
#      resource 1  :  md 1  dev 1  flags -- tcp/eth0
#      resource 2  :  md 1  dev 2  flags -- tcp/lo
#      resource 3  :  md 4  dev 3  flags -- rc_mlx5/mlx5_0:1
#      resource 4  :  md 5  dev 4  flags -- cuda_copy/cuda
#      resource 5  :  md 6  dev 4  flags -- cuda_ipc/cuda
#
"""
    assert transports_of(text) == {"self", "tcp", "rc_mlx5", "cuda_copy", "cuda_ipc"}
    assert transports_of("") == frozenset()
