"""Keeps a PrefixIndex up to date: which instance holds which KV blocks.

Each instance publishes its changes as numbered deltas over NATS. If deltas of an instance are
missing (a gap), the feed fetches a snapshot of its blocks. The loss of an instance's last delta
leaves no gap. Therefore the feed also fetches snapshots at intervals, from one instance after the
other. After a failed fetch, an instance is asked again after a pause. Only instances in the
registry are followed, under their registered incarnation.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from pdmesh.core.kv.prefix.prefix_index import (
    DeltaOutcome,
    IndexDelta,
    PrefixIndex,
    TierDelta,
)
from pdmesh.core.kv.prefix.snapshot_order import Repairs
from pdmesh.core.kv.tier import Tier
from pdmesh.errors import InvalidRequest, MeshError
from pdmesh.events.v1.events_pb2 import KvBlocks
from pdmesh.net import subjects
from pdmesh.net.bus import Bus, Message, Subscription
from pdmesh.net.events import decode_event
from pdmesh.net.registry import RecordChanged, RegistryView
from pdmesh.net.tasks import end, together
from pdmesh.telemetry import metrics, names
from pdmesh.v1.common_pb2 import ROLE_DECODE, ROLE_FUSION, ROLE_PREFILL, InstanceRecord

log = structlog.get_logger(__name__)

_ROLES: Final = (ROLE_PREFILL, ROLE_DECODE, ROLE_FUSION)
_FETCH_S: Final = 5.0
_STEP_BLOCKS: Final = 4096  # blocks of a snapshot or a removal per turn of the event loop

_gaps = metrics.counter(names.INDEX_GAPS, "How often deltas from an instance were missing")
_snapshots = metrics.counter(names.INDEX_SNAPSHOTS, "Snapshot requests, by outcome")
_delay = metrics.histogram(
    names.INDEX_DELTA_DELAY,
    "Time from the publishing of a delta until this process has it",
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0),
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All blocks of one incarnation (life of an instance), after its delta number `sequence`."""

    incarnation: int
    sequence: int
    blocks: tuple[bytes, ...]
    host: tuple[bytes, ...] = ()


Fetch = Callable[[InstanceRecord], Awaitable[Snapshot]]


class Follower(Protocol):
    """Receives all changes of the index, for example to copy them to Redis."""

    def on_delta(self, delta: IndexDelta) -> None: ...
    def on_replaced(self, instance_id: str) -> None: ...
    def on_removed(self, instance_id: str) -> None: ...


class IndexFeed:
    """Updates `index`. Nothing else may change the index."""

    def __init__(
        self,
        index: PrefixIndex,
        bus: Bus,
        view: RegistryView,
        fetch: Fetch,
        *,
        follower: Follower | None = None,
        resync_s: float = 30.0,
    ) -> None:
        self.index = index
        self._bus, self._view, self._fetch = bus, view, fetch
        self._follower = follower
        self._resync_s = resync_s
        self._repairs = Repairs()
        self._fetching: dict[str, asyncio.Task[bool]] = {}
        self._wake = asyncio.Event()
        self._has_gone = asyncio.Event()
        self._subscription: Subscription | None = None
        self._turn = ""

    @property
    def is_whole(self) -> bool:
        """Whether no snapshot must be fetched now, not even for a routine comparison."""
        return not self._repairs

    def age_s(self) -> float:
        """The time for which deltas of some instance have been missing, or 0 (S100).

        An instance whose snapshot is fetched only for a routine comparison does not count.
        """
        doubted = [at for i, at in self._repairs.since() if not self.index.is_whole(i)]
        return time.monotonic() - min(doubted) if doubted else 0.0

    async def start(self) -> None:
        """Subscribe to deltas. No snapshot is fetched before `run`."""
        self._subscription = await self._bus.subscribe(
            subjects.kv_blocks(), self._on_message, on_gap=self._on_gap
        )
        self._view.on_change(self._on_record)
        for record in tuple(self._view.records.values()):
            if _has_blocks(record) and self.index.version(record.instance_id) is None:
                self._mark(record.instance_id)

    async def run(self) -> None:
        """Fetch snapshots as needed until cancelled.

        Exceptions are not caught, because an index that is no longer repaired must not look
        healthy.
        """
        try:
            await together(self._repair(), self._resync(), self._sweep())
        finally:
            await end(self._fetching.values())

    async def stop(self) -> None:
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    def resync_all(self) -> None:
        """Fetch a snapshot of every instance."""
        for record in tuple(self._view.records.values()):
            if _has_blocks(record):
                self._mark(record.instance_id)

    async def _on_message(self, message: Message) -> None:
        try:
            event = decode_event(message, KvBlocks)
        except InvalidRequest as exc:
            log.warning("index.bad_event", error=exc.message)
            return
        header = event.header
        record = self._view.records.get(header.publisher_id)
        if record is None or record.incarnation != header.incarnation:
            return  # the instance's snapshot is fetched when its record appears
        delta = IndexDelta(
            header.publisher_id,
            header.incarnation,
            header.sequence,
            tuple(event.removed),
            tuple(event.stored),
            event.is_cleared,
            _host_part(event),
        )
        self._apply(delta)
        _delay.record(max(0.0, time.time() - header.occurred_at.ToNanoseconds() / 1e9))

    def _apply(self, delta: IndexDelta) -> None:
        was_whole = self.index.is_whole(delta.instance_id)
        version = self.index.version(delta.instance_id)
        outcome = self.index.apply(delta)
        if version is not None and version[0] != delta.incarnation:
            self._has_gone.set()  # the delta has retired the previous incarnation
        if outcome is DeltaOutcome.GAP:
            if was_whole or version is None:
                _gaps.add(1)
                log.info("index.gap", instance_id=delta.instance_id, sequence=delta.sequence)
            self._mark(delta.instance_id)
        elif outcome is DeltaOutcome.APPLIED and self._follower is not None:
            is_next = self.index.version(delta.instance_id) == (delta.incarnation, delta.sequence)
            is_same_life = version is None or version[0] == delta.incarnation
            if is_next and is_same_life and not delta.clears:
                self._follower.on_delta(delta)
            else:  # it released waiting deltas, cleared all blocks, or began an incarnation
                self._follower.on_replaced(delta.instance_id)
        self._pass_on_forgotten()

    def _on_gap(self) -> None:
        """The bus has lost events, possibly of any instance."""
        self.resync_all()

    def _on_record(self, change: RecordChanged) -> None:
        instance_id, record = change.instance_id, change.record
        if record is None:
            num_blocks = self.index.retire_instance(instance_id)
            self._has_gone.set()
            log.debug("index.instance_removed", instance_id=instance_id, num_blocks=num_blocks)
            if change.is_lease_end:
                self.index.forget_history(instance_id)  # the incarnation may register again
            if self._follower is not None:
                self._follower.on_removed(instance_id)
        elif _has_blocks(record):
            version = self.index.version(instance_id)
            if version is not None and version[0] != record.incarnation:
                self.index.retire_instance(instance_id)
                self._has_gone.set()
                if self._follower is not None:
                    self._follower.on_removed(instance_id)
            if self.index.version(instance_id) is None:
                self._mark(instance_id)

    def _pass_on_forgotten(self) -> None:
        """Report to the follower the blocks that the index dropped for lack of room."""
        for delta in self.index.take_forgotten():
            if self._follower is not None:
                self._follower.on_delta(delta)

    def _mark(self, instance_id: str) -> None:
        self._repairs.want(instance_id, time.monotonic())
        self._wake.set()

    async def _repair(self) -> None:
        while True:
            self._wake.clear()
            for instance_id, task in list(self._fetching.items()):
                if task.done():
                    del self._fetching[instance_id]
                    self._repairs.ended(instance_id, task.result(), time.monotonic())
            for instance_id in self._repairs.start(time.monotonic()):
                task = asyncio.create_task(
                    self._load_snapshot(instance_id), name=f"index-snapshot-{instance_id}"
                )
                task.add_done_callback(lambda _: self._wake.set())
                self._fetching[instance_id] = task
            due = self._repairs.next_start()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if due is None else due - time.monotonic()):
                    await self._wake.wait()

    async def _load_snapshot(self, instance_id: str) -> bool:
        """Fetch and load a snapshot. Returns True unless the instance must be asked again.

        It need not be asked again if its part of the index has no gap, or if it is gone.
        """
        record = self._view.records.get(instance_id)
        if record is None:
            return True
        try:
            async with asyncio.timeout(_FETCH_S):
                snapshot = await self._fetch(record)
        except (MeshError, TimeoutError) as exc:
            _snapshots.add(1, {names.ATTR_OUTCOME: "failed"})
            log.debug("index.snapshot_failed", instance_id=instance_id, error=str(exc))
            return False
        now = self._view.records.get(instance_id)
        if now is None:
            return True
        if now.incarnation != snapshot.incarnation:
            return False
        if self.index.version(instance_id) is None:
            self.index.forget_history(instance_id)
        outcome = await self._replace(instance_id, snapshot)
        _snapshots.add(1, {names.ATTR_OUTCOME: outcome.value})
        if outcome is not DeltaOutcome.STALE and self._follower is not None:
            self._follower.on_replaced(instance_id)
        self._pass_on_forgotten()
        # A stale snapshot is older than deltas that arrived during the fetch. If these deltas left
        # no gap, the index is complete.
        return self.index.is_whole(instance_id)

    async def _replace(self, instance_id: str, snapshot: Snapshot) -> DeltaOutcome:
        """Load a snapshot in steps, so that the event loop does other work in between."""
        load = self.index.begin_snapshot(
            instance_id, snapshot.incarnation, snapshot.sequence, snapshot.blocks, snapshot.host
        )
        if load is None:
            return DeltaOutcome.STALE
        while (outcome := load.step(_STEP_BLOCKS)) is None:
            self._pass_on_forgotten()
            await asyncio.sleep(0)
        return outcome

    async def _sweep(self) -> None:
        """Drop the blocks of instances that are gone, in steps."""
        while True:
            await self._has_gone.wait()
            self._has_gone.clear()
            if self.index.sweep(_STEP_BLOCKS):  # more is left
                self._has_gone.set()
                await asyncio.sleep(0)

    async def _resync(self) -> None:
        while True:
            await asyncio.sleep(self._resync_s)
            ids = self.index.instance_ids()
            if ids:
                self._turn = next((i for i in ids if i > self._turn), ids[0])
                self._mark(self._turn)


def _host_part(event: KvBlocks) -> TierDelta | None:
    for part in event.tiers:
        if part.tier == Tier.HOST:
            return TierDelta(tuple(part.removed), tuple(part.stored), part.is_cleared)
    return None


def _has_blocks(record: InstanceRecord) -> bool:
    """Whether the instance may have blocks and can be asked for them.

    An instance that is loading has a role but no address.
    """
    return record.role in _ROLES and bool(record.grpc_address)
