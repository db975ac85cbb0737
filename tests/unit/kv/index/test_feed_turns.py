"""The prefix index loads a large snapshot, or removes a large instance, in small steps.

The event loop can do other work between two steps.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pdmesh.core.kv.prefix.prefix_index import PrefixIndex
from pdmesh.kv.index.feed import IndexFeed, Snapshot
from pdmesh.net.registry import RecordChanged
from pdmesh.v1.common_pb2 import ROLE_PREFILL, InstanceRecord

NUM_BLOCKS = 40_000
RECORD = InstanceRecord(
    instance_id="p0", incarnation=1, role=ROLE_PREFILL, grpc_address="localhost:1"
)


class View:
    """A view of the registry with one instance."""

    is_connected = True

    def __init__(self) -> None:
        self.records = {"p0": RECORD}
        self.callbacks: list[Callable[[RecordChanged], None]] = []

    def on_change(self, callback: Callable[[RecordChanged], None]) -> None:
        self.callbacks.append(callback)

    async def close(self) -> None:
        pass


class Bus:
    async def subscribe(self, *args: Any, **options: Any) -> Any:
        return SimpleNamespace()


async def fetch(record: InstanceRecord) -> Snapshot:
    return Snapshot(1, 5, tuple(i.to_bytes(16, "big") for i in range(NUM_BLOCKS)))


async def seen_until(index: PrefixIndex, is_done: Callable[[], bool]) -> set[int]:
    """The numbers of blocks that the index had at the turns of the event loop until `is_done`."""
    seen = set[int]()
    async with asyncio.timeout(60):
        while not is_done():
            await asyncio.sleep(0)
            seen.add(index.num_blocks)
    return seen


@pytest.mark.req("S100")
async def test_no_turn_of_the_loop_loads_or_drops_a_large_part_of_an_instance() -> None:
    index, view = PrefixIndex(), View()
    feed = IndexFeed(index, Bus(), view, fetch)  # type: ignore[arg-type]
    await feed.start()
    task = asyncio.create_task(feed.run())
    try:
        loading = await seen_until(index, lambda: index.version("p0") == (1, 5))
        assert index.num_blocks == NUM_BLOCKS
        assert longest_step(loading) <= NUM_BLOCKS / 9
        del view.records["p0"]
        for callback in view.callbacks:
            callback(RecordChanged("p0", None, is_lease_end=True))
        assert index.instance_ids() == []
        dropping = await seen_until(index, lambda: index.num_blocks == 0)
        assert longest_step({NUM_BLOCKS, *dropping}) <= NUM_BLOCKS / 9
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    index.check_invariants()


def longest_step(seen: set[int]) -> int:
    ordered = sorted(seen)
    return max(b - a for a, b in itertools.pairwise(ordered))
