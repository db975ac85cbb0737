"""Processes that load weight files together, as the ranks of one node do, without vLLM.

The ranks exchange tensors over gloo. `run_ranks` starts one process per rank and returns their
results. Each process runs this module as a program, with a `RankOrder` as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class RankOrder:
    """What a rank does.

    A rank kills itself at tensor number `dies_at`, and stops itself at `freezes_at`. With `keeps`,
    the rank keeps all tensors until it has loaded the last one. `fails_at` is a file and an offset
    from which the rank's disk has errors.
    """

    rank: int
    size: int
    store: str
    folder: str
    files: Sequence[str]
    window_bytes: int
    wait_s: float = 60.0
    dies_at: int = -1
    freezes_at: int = -1
    keeps: bool = False
    num_loads: int = 1
    fails_at: tuple[str, int] | None = None
    index: dict[str, str] | None = None


@dataclass(slots=True)
class RankResult:
    """What a rank loaded.

    `digests` has the SHA-256 of each tensor's bytes. `rchar` is the number of bytes that the rank
    read while it loaded.
    """

    digests: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    error: str = ""
    message: str = ""
    rchar: int = 0
    reads: list[tuple[str, int, int]] = field(default_factory=list)
    report: dict[str, float] = field(default_factory=dict)


def run_ranks(
    orders: Sequence[RankOrder],
    timeout_s: float = 120.0,
    meanwhile: Callable[[list[subprocess.Popen[str]]], None] | None = None,
) -> list[RankResult | None]:
    """Run the ranks, and return the result of each. The result of a rank that died is None."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.loading.weight_ranks", json.dumps(asdict(order))],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        for order in orders
    ]
    try:
        if meanwhile is not None:
            meanwhile(ranks)
        texts = [rank.communicate(timeout=timeout_s)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [_result(text) for text in texts]


def _result(text: str) -> RankResult | None:
    lines = [line for line in text.splitlines() if line.startswith('{"digests"')]
    return RankResult(**json.loads(lines[-1])) if lines else None


def load(order: RankOrder) -> RankResult:
    import torch.distributed as dist

    from pdmesh.engine.vllm.loading.node_ranks import LoneRank, NodeRanks, TorchRanks
    from pdmesh.engine.vllm.loading.weight_stream import WeightStream, WeightStreamOptions
    from pdmesh.errors import EngineFailed
    from tests.support.loading.weight_files import NotedDisk

    ranks: NodeRanks = LoneRank()
    if order.size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{order.store}", rank=order.rank, world_size=order.size
        )
        ranks = TorchRanks(range(order.size), order.wait_s)
    disk, result = NotedDisk(fails_at=order.fails_at), RankResult()
    options = WeightStreamOptions(order.window_bytes, order.wait_s, disk.open)
    streams = [
        WeightStream(Path(order.folder), order.files, order.index, ranks, options)
        for _ in range(order.num_loads)
    ]
    kept = list[tuple[str, Any]]()
    before = _rchar()
    try:
        for name, tensor in (each for stream in streams for each in stream):
            result.order.append(name)
            if len(result.order) == order.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if len(result.order) == order.freezes_at:
                os.kill(os.getpid(), signal.SIGSTOP)
            if order.keeps:
                kept.append((name, tensor))
            else:
                result.digests[name] = digest_of(tensor)
    except EngineFailed as error:
        result.error, result.message = type(error).__name__, error.message
    result.rchar = _rchar() - before
    result.digests |= {name: digest_of(tensor) for name, tensor in kept}
    result.reads, result.report = disk.reads, asdict(streams[-1].report)
    return result


def digest_of(tensor: Any) -> str:
    import torch

    head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(head + data).hexdigest()


def _rchar() -> int:
    """The bytes that this process has got from read calls on files and pipes."""
    return int(Path("/proc/self/io").read_text().split()[1])


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    print(json.dumps(asdict(load(RankOrder(**told)))), flush=True)
    os._exit(0)  # the destructor of a process group with a dead rank may hang
