"""Gather and RecvScatter compared with the copy bandwidth of their device: `python -m
loadtests.gpu_check.device_ops [--host]`.

Gather copies KV from an engine's blocks to one contiguous buffer, and RecvScatter copies it back.
On a GPU, the program first compares one launch over all layers with a copy within the device. Then
it compares the whole way into a page-locked arena with a plain copy of the same size. It also
reports how long the calling thread was held. With --host, it compares numpy on one thread with
memcpy. The best of several rounds counts. The output is one line of CSV per case. Without a GPU and
without --host, the program says so and ends with code 2.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtests.gpu_check.finding import Finding
from pdmesh.core.kv.layout.head_blocks import head_blocks
from pdmesh.kv.device.scatter import HostBlocks

ROUNDS = 7
HEADER = "where,bytes,layers,block_bytes,ids,operation,ms,GB_per_s,share_of_copy,caller_ms"


@dataclass(frozen=True, slots=True)
class Case:
    """A model's cache on one rank. Each of `num_heads` heads has 128 numbers of 2 bytes."""

    num_layers: int
    num_heads: int
    block_tokens: int
    num_blocks: int  # the prompt's blocks

    @property
    def block_bytes(self) -> int:
        return 2 * self.num_heads * 128 * 2 * self.block_tokens

    @property
    def total(self) -> int:
        return self.num_layers * self.num_blocks * self.block_bytes


CASES = (
    Case(32, 8, 16, 8),
    Case(32, 8, 16, 64),
    Case(32, 8, 16, 256),
    Case(32, 1, 16, 512),
    Case(30, 3, 64, 16),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", action="store_true", help="measure host memory instead")
    if parser.parse_args().host:
        print(HEADER)
        for case in CASES:
            print(*on_host(case), sep="\n")
        return 0
    try:
        import torch
    except ImportError:
        print("no torch here, so no device to measure", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("no GPU here: nothing was measured (--host measures host memory)", file=sys.stderr)
        return 2
    print(f"# {torch.cuda.get_device_name()}")
    print(HEADER)
    for case in CASES:
        print(*on_device(case), sep="\n")
    return 0


def check() -> Finding:
    """The rows as a section of the whole check. The section has no bar and cannot fail."""
    heads = HEADER.split(",")
    rows = [
        dict(zip(heads, row.split(","), strict=True)) for case in CASES for row in on_device(case)
    ]
    claim = (
        f"One launch over all layers against a copy of the same bytes; best of {ROUNDS}. "
        "`arena`: the whole way into locked host memory or from it."
    )
    return Finding("Operators against copies", claim, True, rows)


def id_lists(case: Case) -> dict[str, list[int]]:
    rng = np.random.default_rng(1)
    scattered = rng.permutation(4 * case.num_blocks)[: case.num_blocks]
    return {"run": list(range(3, 3 + case.num_blocks)), "random": scattered.tolist()}


def line(
    where: str, case: Case, ids: str, operation: str, s: float, copy_s: float, caller_s: float
) -> str:
    parts = (where, case.total, case.num_layers, case.block_bytes, ids, operation)
    rate = case.total / s / 1e9
    numbers = f"{1000 * s:.3f},{rate:.1f},{copy_s / s:.2f},{1000 * caller_s:.3f}"
    return ",".join(map(str, parts)) + "," + numbers


# -- host -----------------------------------------------------------------------------------------


def on_host(case: Case) -> Iterator[str]:
    shape = (4 * case.num_blocks + 4, case.block_bytes)
    caches = [np.ones(shape, np.uint8) for _ in range(case.num_layers)]
    blocks, buffer = HostBlocks(caches), np.ones(case.total, np.uint8)
    other = np.ones_like(buffer)
    copy_s = best(lambda: np.copyto(other, buffer))
    yield line("host", case, "-", "copy", copy_s, copy_s, copy_s)
    for name, ids in id_lists(case).items():
        for operation, work in (
            ("gather", lambda ids=ids: blocks.gather(ids, buffer)),
            ("scatter", lambda ids=ids: blocks.scatter(buffer, ids)),
        ):
            s = best(work)
            yield line("host", case, name, operation, s, copy_s, s)


def best(work: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


# -- device ---------------------------------------------------------------------------------------


def on_device(case: Case) -> Iterator[str]:
    """The rows of CSV for one case on the GPU."""
    import torch

    from pdmesh.kv.device.copies import DeviceCopies, lock_pages
    from pdmesh.kv.device.operators import DeviceBlocks

    shape = (2, 4 * case.num_blocks + 4, case.block_tokens, case.num_heads, 128)
    caches = [
        torch.ones(shape, dtype=torch.bfloat16, device="cuda") for _ in range(case.num_layers)
    ]
    where = head_blocks("kbnhc", shape, caches[0].stride(), 2)
    blocks = DeviceBlocks(caches, where)
    buffer = torch.ones(case.total, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(buffer)
    copy_s = best_on_stream(lambda: other.copy_(buffer))
    yield line("device", case, "-", "copy", copy_s, copy_s, 0.0)
    for name, ids in id_lists(case).items():
        index = torch.tensor(ids, device="cuda")
        for operation, work in (
            ("gather", lambda index=index: blocks.gather(index, buffer)),
            ("scatter", lambda index=index: blocks.scatter(buffer, index)),
        ):
            yield line("device", case, name, operation, best_on_stream(work), copy_s, 0.0)

    arena = np.ones(case.total, np.uint8)
    lock_pages(arena)
    out = torch.from_numpy(arena)
    for operation, plain in (
        ("copy out", lambda: out.copy_(buffer, non_blocking=True)),
        ("copy in", lambda: buffer.copy_(out, non_blocking=True)),
    ):
        copy_s = best_on_stream(plain)
        yield line("arena", case, "-", operation, copy_s, copy_s, 0.0)
    copies = DeviceCopies(blocks, buffer.device)
    heads, layers = (0, case.num_heads), (0, case.num_layers)
    for name, ids in id_lists(case).items():
        for operation, ask in (
            ("gather", lambda end, ids=ids: copies.gather(ids, arena, layers, end)),
            ("scatter", lambda end, ids=ids: copies.scatter(arena, ids, heads, end)),
        ):
            s, caller_s = best_called_back(ask)
            yield line("arena", case, name, operation, s, copy_s, caller_s)
    copies.close()


def best_on_stream(work: Callable[[], Any]) -> float:
    """The seconds that the work takes in the fastest round, by the device's clock."""
    import torch

    times: list[float] = []
    for _ in range(ROUNDS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1000)
    return min(times)


def best_called_back(ask: Callable[[Callable[[], None]], None]) -> tuple[float, float]:
    """Seconds until the bytes are in place, and until the call returned, in the fastest round."""
    times = []
    for _ in range(ROUNDS):
        ended = threading.Event()
        began = time.perf_counter()
        ask(ended.set)
        returned = time.perf_counter()
        ended.wait()
        times.append((time.perf_counter() - began, returned - began))
    return min(times)


if __name__ == "__main__":
    sys.exit(main())
