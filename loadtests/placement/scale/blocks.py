"""Measures the index of a large mesh: a snapshot of very many blocks, KV events, and memory."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import psutil

from loadtests.placement.index import measure_memory
from loadtests.placement.plan import build
from pdmesh.core.kv.prefix.prefix_index import IndexDelta, PrefixIndex
from pdmesh.events.v1.events_pb2 import KvBlocks
from pdmesh.net.bus import Message
from pdmesh.net.events import BINARY, CONTENT_TYPE, decode_event

_STEP: Final = 4096  # blocks per step, as when the index loads a real snapshot
_EVENT_BLOCKS: Final = 64


def _names(seed: int, count: int) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(16) for _ in range(count)]


def _timed(steps: Callable[[], bool]) -> list[float]:
    """CPU seconds of each call, until a call returns False."""
    times, is_going = [], True
    while is_going:
        began = time.thread_time()
        is_going = steps()
        times.append(time.thread_time() - began)
    return times


def snapshot(num_blocks: int) -> dict[str, float]:
    """Measure the load of a snapshot of an instance that the index does not know, and its
    removal.
    """
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


def events(num_blocks: int) -> dict[str, float]:
    """Measure blocks/s on one core: with decoding of the messages, and with the index alone."""
    names, messages = _names(2, num_blocks), list[Message]()
    for number, start in enumerate(range(0, num_blocks, _EVENT_BLOCKS)):
        event = KvBlocks(stored=names[start : start + _EVENT_BLOCKS])
        if start >= num_blocks // 2:  # in the second half, as many blocks leave as come
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


def memory(num_blocks: int) -> dict[str, float]:
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
