"""The ranks of one node, which load the same model in several ways, one after the other."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from loadtests.loading.storage import SharedRate, SlowDisk, shared_times
from pdmesh.core.loading.weight_files import in_order
from pdmesh.engine.vllm.loading.node_ranks import LoneRank, NodeRanks, TorchRanks
from pdmesh.engine.vllm.loading.weight_stream import WeightStream, WeightStreamOptions
from pdmesh.engine.vllm.loading.window_reader import read_header

WAIT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Loads:
    """The work of the ranks.

    Each round runs all `ways`, every second round in reverse order. `link_bytes_per_s` is the rate
    at which weights are copied to a device. With 0, the copy takes no time.
    """

    folder: str
    index: Mapping[str, str]
    num_ranks: int
    rounds: int
    disk_bytes_per_s: float
    link_bytes_per_s: float
    window_bytes: int
    ways: Sequence[str]


@dataclass(frozen=True, slots=True)
class Load:
    """The result of one way to load in one round. All ranks together read `disk_bytes`."""

    way: str
    seconds: float
    disk_bytes: int
    num_allocations: int


@dataclass(slots=True)
class Rank:
    """One rank's process. `weights` is its share of the model's weights, as an engine has it."""

    loads: Loads
    number: int
    ranks: NodeRanks
    disk: SlowDisk
    link: SharedRate
    weights: dict[str, Any]

    def copy(self, name: str, tensor: Any) -> None:
        """Copy a tensor to `weights`: this rank's rows of a matrix, or a whole vector."""
        own = self.weights[name]
        part = tensor if tensor.dim() == 1 else tensor.narrow(0, self.number * len(own), len(own))
        own.copy_(part)
        self.link.take(tensor.numel() * tensor.element_size())

    def load(self, way: str) -> int:
        """Load the model by the named way; returns the number of buffers that were allocated."""
        return WAYS[way](self)


def each_rank_reads(rank: Rank) -> int:
    """Each rank reads its tensors in the model's order, one by one."""
    import torch

    folder, files = Path(rank.loads.folder), sorted(set(rank.loads.index.values()))
    tensors = {
        tensor.name: (file, tensor)
        for file in files
        for tensor in read_header(folder / file, rank.disk.open).tensors
    }
    with contextlib.ExitStack() as opened:
        open_files = {f: opened.enter_context(rank.disk.open(folder / f)) for f in files}
        for name in rank.loads.index:
            file, stored = tensors[name]
            memory = bytearray(stored.num_bytes)
            at = 0
            while at < len(memory):
                at += open_files[file].read_into(memoryview(memory)[at:], stored.begin + at)
            tensor = torch.frombuffer(memory, dtype=torch.bfloat16).reshape(stored.shape)
            rank.copy(name, tensor)
    return len(tensors)


def each_rank_maps(rank: Rank) -> int:
    """Each rank maps the files into its memory one by one, as vLLM's own loader does."""
    from safetensors import safe_open

    for file in in_order(set(rank.loads.index.values())):
        with safe_open(Path(rank.loads.folder, file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                rank.copy(name, tensors.get_tensor(name))
    return 0


def in_file_order(rank: Rank) -> int:
    return _streamed(rank, overlaps=True)


def without_overlap(rank: Rank) -> int:
    return _streamed(rank, overlaps=False)


def _streamed(rank: Rank, *, overlaps: bool) -> int:
    options = WeightStreamOptions(rank.loads.window_bytes, WAIT_S, rank.disk.open, overlaps)
    files = in_order(set(rank.loads.index.values()))
    stream = WeightStream(Path(rank.loads.folder), files, rank.loads.index, rank.ranks, options)
    for name, tensor in stream:
        rank.copy(name, tensor)
    return stream.report.num_allocations


WAYS: Final[Mapping[str, Callable[[Rank], int]]] = {
    "each rank reads": each_rank_reads,
    "each rank maps": each_rank_maps,
    "file order": in_file_order,
    "no overlap": without_overlap,
}


def run(loads: Loads, store: Path) -> list[Load]:
    """Run all rounds with `num_ranks` ranks; returns the times that the first rank measured."""
    context = multiprocessing.get_context("spawn")
    times = shared_times()
    results: Any = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(loads, number, str(store), times, results))
        for number in range(loads.num_ranks)
    ]
    for rank in ranks:
        rank.start()
    try:
        found = results.get(timeout=3600)
        for rank in ranks:
            rank.join(60)
    finally:
        for rank in ranks:
            rank.kill()
    return list(found)


def _rank(loads: Loads, number: int, store: str, times: Any, results: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=number, world_size=loads.num_ranks
    )
    ranks = TorchRanks(range(loads.num_ranks), WAIT_S) if loads.num_ranks > 1 else LoneRank()
    rank = Rank(
        loads,
        number,
        ranks,
        SlowDisk(SharedRate(loads.disk_bytes_per_s, times)),
        SharedRate(loads.link_bytes_per_s, shared_times()),
        _weights(loads),
    )
    found = list[Load]()
    for turn in range(loads.rounds + 1):  # the first round is a warm-up
        for way in loads.ways if turn % 2 else list(loads.ways)[::-1]:
            load = _timed(rank, way, dist)
            if turn:
                found.append(load)
    if number == 0:
        results.put(found)


def _timed(rank: Rank, way: str, dist: Any) -> Load:
    import torch

    rank.disk.num_bytes = 0
    dist.barrier()
    began = time.perf_counter()
    num_allocations = rank.load(way)
    dist.barrier()
    seconds = time.perf_counter() - began
    disk_bytes = torch.tensor([rank.disk.num_bytes])
    dist.all_reduce(disk_bytes)
    return Load(way, seconds, int(disk_bytes), num_allocations)


def _weights(loads: Loads) -> dict[str, Any]:
    import torch

    made = dict[str, Any]()
    for file in set(loads.index.values()):
        for tensor in read_header(Path(loads.folder, file)).tensors:
            rows, *rest = tensor.shape
            own = rows // loads.num_ranks if rest else rows
            made[tensor.name] = torch.zeros(own, *rest, dtype=torch.bfloat16)
    return made
