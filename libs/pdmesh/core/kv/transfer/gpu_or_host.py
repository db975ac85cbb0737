"""Decides whether KV is sent from and received in the GPU's memory or the host's (S50, S57).

An arena is memory that is registered once for KV transfers. If the arena is on the GPU, UCX moves
KV past the host: by cuda_ipc to another GPU of the same machine, or by GPUDirect over RDMA to
another machine. If UCX can do neither, the arena is in page-locked host memory, and the GPU's copy
engines fill and empty it. If the arena were on the GPU, UCX itself would copy the KV through host
memory in small pieces, and the KV agent, which moves a rank's KV, would wait.

If `REQUIRE_RDMA` is set, an instance fails at its start if UCX finds no RDMA, if KV would not leave
this machine, or if a GPU's KV would go through host memory for lack of a direct path.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

# Prefixes of UCX's RDMA transports: verbs and mlx5 (rc, dc, ud), EFA (srd), BlueField's DMA (gga).
_RDMA: Final = ("rc_", "dc_", "ud_", "srd", "gga_")
_COPIES: Final = "cuda_copy"
_OWN_GPUS: Final = "cuda_ipc"


class KvMemory(StrEnum):
    """Where arenas are. As a setting, AUTO means DEVICE unless `_obstacle` prevents that."""

    AUTO = "auto"
    HOST = "host"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class PathFacts:
    """What was found out about this machine.

    `transports` has the transports that UCX offers under the instance's options. `reads_gpu_memory`
    is how an RDMA device accesses the GPU's memory: "nvidia_peermem", "DMA-BUF", or empty.
    """

    device: str  # cpu or cuda
    is_local: bool  # the address for KV is a loopback one, so KV stays on this machine
    transports: frozenset[str] = frozenset()
    reads_gpu_memory: str = ""
    arena_bytes: int = 0
    free_bytes: int = 0  # of the GPU's memory

    @property
    def rdma(self) -> tuple[str, ...]:
        return tuple(sorted(t for t in self.transports if t.startswith(_RDMA)))


@dataclass(frozen=True, slots=True)
class KvPath:
    memory: KvMemory  # HOST or DEVICE
    reason: str

    def __str__(self) -> str:
        return f"{self.memory.value}: {self.reason}"


class NoSuchPath(ValueError):
    """The settings ask for a path that this machine does not have. The text is one line."""


def decide_path(asked: KvMemory, facts: PathFacts, *, requires_rdma: bool) -> KvPath:
    """Decide where arenas are, and why.

    Raises NoSuchPath if the machine cannot do what KV_MEMORY=device or REQUIRE_RDMA demands.
    """
    obstacle = _obstacle(facts)
    if requires_rdma:
        _check_rdma(asked, facts, obstacle)
    if asked is KvMemory.DEVICE and obstacle:
        raise NoSuchPath(f"KV_MEMORY is device, but {obstacle}")
    if facts.device == "cpu":
        return KvPath(KvMemory.HOST, "the engine computes on a CPU")
    if asked is KvMemory.HOST:
        return KvPath(KvMemory.HOST, "KV_MEMORY is host")
    if obstacle:
        return KvPath(KvMemory.HOST, obstacle)
    if facts.is_local:
        return KvPath(KvMemory.DEVICE, f"{_OWN_GPUS} between the GPUs of this machine")
    ways = [f"GPUDirect by {facts.reads_gpu_memory} over {', '.join(facts.rdma)}"]
    ways += [_OWN_GPUS] * (_OWN_GPUS in facts.transports)
    return KvPath(KvMemory.DEVICE, " and ".join(ways))


def _obstacle(facts: PathFacts) -> str:
    """Why KV must go through host memory. Empty if it need not."""
    if facts.device == "cpu":
        return "the engine computes on a CPU"
    if _COPIES not in facts.transports:
        return (
            f"UCX has no {_COPIES} here, only {_shown(facts)}: UCX_TLS may leave it out, or "
            "libcuda.so.1 is missing"
        )
    if facts.is_local and _OWN_GPUS not in facts.transports:
        return f"UCX has no {_OWN_GPUS} here, only {_shown(facts)}"
    if not facts.is_local and not facts.rdma:
        return f"UCX has no RDMA here, only {_shown(facts)}"
    if not facts.is_local and not facts.reads_gpu_memory:
        return (
            f"{', '.join(facts.rdma)} cannot read the GPU's memory: nvidia_peermem is not loaded, "
            "and the driver has no DMA-BUF"
        )
    if facts.arena_bytes > facts.free_bytes:
        return (
            f"the arenas need {_mib(facts.arena_bytes)} MiB of the GPU's memory, and "
            f"{_mib(facts.free_bytes)} MiB are free"
        )
    return ""


def _check_rdma(asked: KvMemory, facts: PathFacts, obstacle: str) -> None:
    if facts.is_local:
        raise NoSuchPath("REQUIRE_RDMA is set, but KV is sent to a loopback address: INNER_HOST")
    if not facts.rdma:
        raise NoSuchPath(f"REQUIRE_RDMA is set, but UCX has no RDMA here, only {_shown(facts)}")
    if facts.device != "cpu" and asked is not KvMemory.HOST and obstacle:
        raise NoSuchPath(f"REQUIRE_RDMA is set, but KV would go through host memory: {obstacle}")


def transports_of(context_info: str) -> frozenset[str]:
    """The transports in UCX's description of a context, which has lines like "... -- tcp/eth0"."""
    found = set()
    for line in context_info.splitlines():
        words = line.strip("# ").split()
        if words[:1] == ["resource"] and "/" in words[-1]:
            found.add(words[-1].split("/", 1)[0])
    return frozenset(found)


def _shown(facts: PathFacts) -> str:
    return ", ".join(sorted(facts.transports)) or "nothing"


def _mib(num_bytes: int) -> int:
    return -(-num_bytes // (1 << 20))
