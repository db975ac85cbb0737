"""Publishes an instance's KV blocks, load and failures on the bus. The bus may lose these events.

Changes of the stored blocks are published every 30 ms. A consumer that missed an event fetches a
snapshot and continues from the snapshot's sequence number. The load is published 15 ms after it
changed, and at least every second. The load is a hint for placement; admission never depends on it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.instance.prompt_times import LoadBook
from pdmesh.core.kv.tier import Tier
from pdmesh.engine.base import BlocksChanged
from pdmesh.events.v1.events_pb2 import ErrorReported, InstanceLoad, KvBlocks
from pdmesh.instance.legs import instruments
from pdmesh.net import subjects
from pdmesh.net.events import EventPublisher
from pdmesh.v1.instance_service_pb2 import Load

BLOCKS_EVERY_S: Final = 0.03
LOAD_EVERY_S: Final = 0.015  # the master's view is at most 20 ms old, transport included (S100)
# The load is sent again after this time, even if it did not change. The last report may have been
# lost, or the master may be new.
LOAD_AGAIN_S: Final = 1.0
MAX_ERRORS: Final = 256  # waiting to be published


@dataclass(slots=True)
class BlockDelta:
    """The net changes of a tier's blocks since the last event."""

    is_cleared: bool = False
    removed: dict[bytes, None] = field(default_factory=dict)
    stored: dict[bytes, None] = field(default_factory=dict)

    def add(self, change: BlocksChanged) -> None:
        if change.is_cleared:
            self.is_cleared = True
            self.removed.clear()
            self.stored.clear()
        for block_hash in change.removed:
            self.stored.pop(block_hash, None)
            self.removed[block_hash] = None
        for block_hash in change.stored:
            # A block that was removed and stored again stays in both lists, because consumers
            # apply the removals first.
            self.stored[block_hash] = None

    def apply_to(self, known: dict[bytes, None]) -> None:
        if self.is_cleared:
            known.clear()
        for block_hash in self.removed:
            known.pop(block_hash, None)
        known.update(self.stored)


class KvBlocksPublisher:
    def __init__(self, events: EventPublisher, instance_id: str) -> None:
        self._events, self._subject = events, subjects.kv_blocks(instance_id)
        self._deltas: defaultdict[Tier, BlockDelta] = defaultdict(BlockDelta)
        self._published: defaultdict[Tier, dict[bytes, None]] = defaultdict(dict)
        self._sequence = 0
        self._changed = asyncio.Event()

    def add(self, change: BlocksChanged) -> None:
        self._deltas[change.tier].add(change)
        self._changed.set()

    def snapshot(self) -> tuple[int, dict[Tier, list[bytes]]]:
        """The number of the last event, and each tier's blocks as of this event."""
        return self._sequence, {tier: list(held) for tier, held in self._published.items()}

    async def run(self) -> None:
        while True:
            await self._changed.wait()
            await asyncio.sleep(BLOCKS_EVERY_S)  # gather, so that a burst is one event
            await self._publish()

    async def publish_rest(self) -> None:
        """Publish the changes that `run` has not published. Call this after `run` has ended."""
        await self._publish()

    async def _publish(self) -> None:
        deltas, self._deltas = self._deltas, defaultdict(BlockDelta)
        self._changed.clear()
        for tier, delta in deltas.items():
            delta.apply_to(self._published[tier])
        own = deltas.pop(Tier.ENGINE, BlockDelta())
        message = KvBlocks(
            is_cleared=own.is_cleared,
            removed=list(own.removed),
            stored=list(own.stored),
            tiers=[
                KvBlocks.TierBlocks(
                    tier=tier.value,
                    is_cleared=delta.is_cleared,
                    removed=list(delta.removed),
                    stored=list(delta.stored),
                )
                for tier, delta in sorted(deltas.items())
            ],
        )
        self._sequence += 1
        await self._events.publish(self._subject, message)
        assert message.header.sequence == self._sequence


class LoadPublisher:
    """Publishes the load that `read` returns, and the requests from `book`: those that were
    admitted or computed since the last report.
    """

    def __init__(
        self, events: EventPublisher, instance_id: str, read: Callable[[], Load], book: LoadBook
    ) -> None:
        self._events, self._subject = events, subjects.instance_load(instance_id)
        self._read, self._book = read, book
        self._changed = asyncio.Event()

    def changed(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOAD_AGAIN_S):
                    await self._changed.wait()
            # Wait first: the beginning and the end of a short request then make one event.
            await asyncio.sleep(LOAD_EVERY_S)
            self._changed.clear()
            load = self._read()
            admitted, computed = self._book.take()
            await self._events.publish(
                self._subject,
                InstanceLoad(
                    num_slots=load.num_slots,
                    num_slots_used=load.num_slots_used,
                    num_kv_blocks_free=load.num_kv_blocks_free,
                    is_draining=load.is_draining,
                    admitted_request_ids=admitted,
                    computed=[
                        InstanceLoad.Computed(
                            request_id=prompt.request_id,
                            num_tokens=prompt.num_tokens,
                            num_cached_tokens=prompt.num_cached_tokens,
                            seconds=prompt.seconds,
                            num_steps=prompt.num_steps,
                            num_beside=prompt.num_beside,
                        )
                        for prompt in computed
                    ],
                ),
            )


class ErrorPublisher:
    """Publishes failures that an operator may want to see.

    At most `MAX_ERRORS` wait to be published. Further failures are dropped and counted.
    """

    def __init__(self, events: EventPublisher, instance_id: str, service: str) -> None:
        self._events, self._subject = events, subjects.error_reported(instance_id)
        self._service = service
        self._waiting: asyncio.Queue[ErrorReported] = asyncio.Queue(MAX_ERRORS)

    def report(self, reason: str, message: str, request_id: str) -> None:
        """`request_id` is empty if the failure does not belong to a single request."""
        event = ErrorReported(
            service=self._service, reason=reason, message=message, request_id=request_id
        )
        try:
            self._waiting.put_nowait(event)
        except asyncio.QueueFull:
            instruments.errors_dropped.add(1)

    async def run(self) -> None:
        while True:
            await self._events.publish(self._subject, await self._waiting.get())

    async def publish_rest(self) -> None:
        """Publish the waiting failures after `run` has ended. The last ones may explain the end."""
        while not self._waiting.empty():
            await self._events.publish(self._subject, self._waiting.get_nowait())
