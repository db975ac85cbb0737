"""Whether decisions, the index and the virtual clock carry a mesh of thousands of instances
(`make bench NAME=scale`).

python -m loadtests.placement.scale --rounds 3 --out loadtests/results/scale-2026-11-28

What is compared takes turns in every round. The baseline of a decision is the same core without its
shortlist; that of a snapshot in steps is the same snapshot at once; that of events is the index
without messages.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import psutil

from loadtests.harness.results import write
from loadtests.placement.index import measure_memory
from loadtests.placement.plan import build
from loadtests.placement.scale_mesh import run as run_clock
from pdmesh.core.kv.prefix.prefix_index import IndexDelta, PrefixIndex
from pdmesh.events.v1.events_pb2 import KvBlocks
from pdmesh.net.bus import Message
from pdmesh.net.events import BINARY, CONTENT_TYPE, decode_event

_WORKERS: Final = (100, 1250, 10_000)
_RTP: Final = 1250  # 750 prefills and 500 decodes
_STEP: Final = 4096  # as the index's feed
_EVENT_BLOCKS: Final = 64

Found = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=600, help="decisions of a cell in a round")
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=100.0, help="requests/s on the virtual clock")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    options = parser.parse_args()
    found: Found = defaultdict(list)
    _in_a_child(found, _memory, options.blocks)
    clocks = [
        run_clock(10_000, options.rate, options.requests, is_shortlisted=is_shortlisted)
        for is_shortlisted in (True, False)
    ]
    clock = [asdict(c) | {"virtual seconds per CPU second": c.factor} for c in clocks]
    for number in range(options.rounds):
        _in_a_child(found, in_the_core, options.count)
        _note(found, through_grpc(options.count))
        _in_a_child(found, at_a_gateway, options.count // 4)
        _in_a_child(found, held_by_a_gateway, options.requests)
        _in_a_child(found, _snapshot, options.blocks)
        _in_a_child(found, _events, options.blocks // 4)
        text = f"Rounds: {number + 1}.\n\n{_tables(found, clock)}"
        print(text, flush=True)
        if options.out:  # after each round, since a run may be cut short
            about = (__doc__ or "").split("\n\n")[-1].strip().replace("\n", " ")
            figures = {"found": found, "clock": clock}
            write(options.out, "loadtests.placement.scale", "Scale", about, text, **figures)


def _tables(found: Found, clock: Sequence[dict[str, float]]) -> str:
    lines = ["| figure | median | lowest to highest |", "|---|---|---|"]
    lines += [
        f"| {name} | {statistics.median(v):,.3f} | {min(v):,.3f} to {max(v):,.3f} |"
        for name, v in found.items()
    ]
    lines += ["", "| virtual clock, 10,000 instances | shortlist | all scored |", "|---|---|---|"]
    lines += [f"| {name} | {clock[0][name]:,.3f} | {clock[1][name]:,.3f} |" for name in clock[0]]
    return "\n".join(lines)


def _in_a_child(found: Found, measure: Callable[[int], dict[str, float]], size: int) -> None:
    with get_context("spawn").Pool(1) as pool:
        _note(found, pool.apply(measure, (size,)))


def _note(found: Found, figures: dict[str, float]) -> None:
    for name, value in figures.items():
        found[name].append(value)


# --- the index -----------------------------------------------------------------------------------


def _names(seed: int, count: int) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(16) for _ in range(count)]


def _timed(steps: Callable[[], bool]) -> list[float]:
    """CPU seconds of each call until one returns False."""
    times, is_going = [], True
    while is_going:
        began = time.thread_time()
        is_going = steps()
        times.append(time.thread_time() - began)
    return times


def _snapshot(num_blocks: int) -> dict[str, float]:
    """A snapshot to an index that knows nothing of the instance, and the instance's removal."""
    names, whole, stepped = _names(1, num_blocks), PrefixIndex(), PrefixIndex()
    gc.freeze()
    began = time.thread_time()
    whole.load_snapshot("a", 1, 1, [bytes(bytearray(n)) for n in names])
    at_once_s = time.thread_time() - began
    load = stepped.begin_snapshot("a", 1, 1, (bytes(bytearray(n)) for n in names))
    assert load is not None
    steps = _timed(lambda: load.step(_STEP) is None)
    assert whole.blocks("a") == stepped.blocks("a")
    began = time.thread_time()
    whole.remove_instance("a")
    removed_s = time.thread_time() - began
    stepped.retire_instance("a")
    sweeps = _timed(lambda: stepped.sweep(_STEP))
    what = f"snapshot of {num_blocks:,} blocks"
    return {
        f"{what}: CPU ms at once": 1e3 * at_once_s,
        f"{what}: CPU ms of all steps": 1e3 * sum(steps),
        f"{what}: CPU ms of a step, median": 1e3 * statistics.median(steps),
        f"{what}: CPU ms of the longest step": 1e3 * max(steps),
        f"{what}: longest step / at once": max(steps) / at_once_s,
        f"removal of {num_blocks:,} blocks: CPU ms at once": 1e3 * removed_s,
        f"removal of {num_blocks:,} blocks: CPU ms of the longest step": 1e3 * max(sweeps),
    }


def _events(num_blocks: int) -> dict[str, float]:
    """Blocks/s on one core: messages decoded and applied, and the index alone."""
    names, messages = _names(2, num_blocks), list[Message]()
    for number, start in enumerate(range(0, num_blocks, _EVENT_BLOCKS)):
        event = KvBlocks(stored=names[start : start + _EVENT_BLOCKS])
        if start >= num_blocks // 2:  # as many leave as come, from the middle on
            first = start - num_blocks // 2
            event.removed.extend(names[first : first + _EVENT_BLOCKS])
        event.header.publisher_id, event.header.incarnation = "a", 1
        event.header.sequence = number + 1
        messages.append(Message("", event.SerializeToString(), {CONTENT_TYPE: BINARY}))
    through, alone, deltas = PrefixIndex(), PrefixIndex(), list[IndexDelta]()
    began = time.thread_time()
    for message in messages:
        told: Any = decode_event(message, KvBlocks)
        header = told.header
        delta = IndexDelta("a", 1, header.sequence, tuple(told.removed), tuple(told.stored))
        through.apply(delta)
    through_s = time.thread_time() - began
    for message in messages:
        told = decode_event(message, KvBlocks)
        number = told.header.sequence
        deltas.append(IndexDelta("a", 1, number, tuple(told.removed), tuple(told.stored)))
    began = time.thread_time()
    for delta in deltas:
        alone.apply(delta)
    alone_s = time.thread_time() - began
    num_events = num_blocks + sum(len(d.removed) for d in deltas)
    return {
        "KV events, decoded and applied: blocks/s on one core": num_events / through_s,
        "KV events, the index alone: blocks/s on one core": num_events / alone_s,
    }


def _memory(num_blocks: int) -> dict[str, float]:
    gc.collect()
    before = psutil.Process().memory_info().rss
    kept = build(10_000)
    grown = psutil.Process().memory_info().rss - before
    assert len(kept[0].fleet.instances) == 10_000
    row = measure_memory("bitmask per block", 4, 100, num_blocks)
    return {
        "memory of a million blocks, 4 holders each, MB": row.bytes_per_block,
        "memory of an instance in the fleet, with 64 prefixes, KB": grown / 10_000 / 1e3,
    }


if __name__ == "__main__":
    main()
