"""Boards: JetStream buckets that one service writes and others read.

A board has one entry per key, a protobuf message in JSON. An entry outlives its writer: it stays
until it is replaced or removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

import structlog
from google.protobuf.json_format import Parse, ParseError
from google.protobuf.message import Message

from pdmesh.errors import VersionConflict
from pdmesh.events.v1.events_pb2 import FaultReport, HealthChanged
from pdmesh.net.event_json import to_json
from pdmesh.net.nats import buckets
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.kv_bucket import (
    KvBucket,
    KvEntry,
    KvWatch,
    WrongRevision,
)
from pdmesh.v1.admin_service_pb2 import OutOfService, Pin, RegisteredAdapter

log = structlog.get_logger(__name__)


M = TypeVar("M", bound=Message)


class Board(Generic[M]):
    """A board with entries of the type `kind`.

    The parameter `instance_id` is the key of an entry. On the boards of pins and of adapters, that
    is a pin's id or an adapter's name.
    """

    def __init__(self, bucket: KvBucket, kind: type[M]) -> None:
        self._bucket, self._kind = bucket, kind

    async def write(self, instance_id: str, message: M, last: int | None = None) -> int:
        """Write an entry and return its new revision. Raises Unavailable.

        If `last` is given, this raises VersionConflict unless the entry is at revision `last`. The
        revision of an absent entry is 0.
        """
        try:
            return await self._bucket.put(instance_id, to_json(message), last=last)
        except WrongRevision as exc:
            raise VersionConflict(f"another writer has just changed {instance_id}") from exc

    async def forget(self, instance_id: str, last: int | None = None) -> int:
        """Remove an entry. Returns the revision of the removal, and raises like `write`."""
        try:
            return await self._bucket.delete(instance_id, last=last)
        except WrongRevision as exc:
            raise VersionConflict(f"another writer has just changed {instance_id}") from exc

    async def read(self) -> dict[str, M]:
        """Read all entries, by key. Waits if the store is unreachable."""
        view = self.watch(lambda _: None)
        try:
            await view.loaded.wait()
            return dict(view.known)
        finally:
            await view.close()

    def watch(
        self, on_entry: Callable[[M], None], on_gone: Callable[[str], None] = lambda _: None
    ) -> BoardView[M]:
        return BoardView(self._bucket, self._kind, on_entry, on_gone)


class BoardView(Generic[M]):
    """A live copy of a board. It delivers every current entry, then each new one.

    After an outage it delivers all entries again. If the bucket was wiped, its former entries stay
    in `known`. Their keys are in `missing` until the entries are written again.
    """

    def __init__(
        self,
        bucket: KvBucket,
        kind: type[M],
        on_entry: Callable[[M], None],
        on_gone: Callable[[str], None],
    ) -> None:
        self._kind, self._on_known, self._on_gone = kind, on_entry, on_gone
        self.known: dict[str, M] = {}
        self.missing: set[str] = set()
        self._revisions: dict[str, int] = {}  # by key, as last seen; includes removed keys
        self._unseen: set[str] = set()  # known keys that the reopened watch has not shown yet
        self.loaded = asyncio.Event()
        self._watch: KvWatch = bucket.watch(self._on_entry, self._on_loaded, self._on_reset)

    @property
    def is_current(self) -> bool:
        """Whether `known` is up to date.

        False while the store is unreachable or not fully read. Do not decide from `known` then.
        """
        return self._watch.is_live

    def revision(self, key: str) -> int:
        """The revision to pass as `last` to a write. 0 if the bucket does not have the key."""
        return self._revisions.get(key, 0)

    def wrote(self, key: str, message: M | None, revision: int) -> None:
        """Add this process's own write to the view at once. A message of None is a removal."""
        self._revisions[key] = revision
        self.missing.discard(key)
        if message is not None:
            self.known[key] = message
            self._on_known(message)
        elif self.known.pop(key, None) is not None:
            self._on_gone(key)

    async def close(self) -> None:
        await self._watch.close()

    def _on_reset(self) -> None:
        self._unseen = set(self._revisions)

    def _on_loaded(self) -> None:
        """Find wiped entries (F21).

        A key was wiped if the reopened watch has shown neither a value nor a removal marker for it.
        """
        for key in self._unseen:
            self._revisions.pop(key, None)
        self.missing |= self._unseen & self.known.keys()
        self._unseen.clear()
        self.loaded.set()

    def _on_entry(self, entry: KvEntry) -> None:
        is_reopening = entry.key in self._unseen
        self._unseen.discard(entry.key)
        if entry.revision <= self.revision(entry.key) and not is_reopening:
            return  # the watch delivers our own write
        self._revisions[entry.key] = entry.revision
        self.missing.discard(entry.key)
        if entry.value is None:
            if self.known.pop(entry.key, None) is not None:
                self._on_gone(entry.key)
            return
        try:
            message = Parse(entry.value, self._kind(), ignore_unknown_fields=True)
        except ParseError:
            log.warning("board.bad_entry", key=entry.key, kind=self._kind.DESCRIPTOR.name)
            return
        self.known[entry.key] = message
        self._on_known(message)


def health_board(bus: NatsBus) -> Board[HealthChanged]:
    """The health-monitor's verdicts: which processes are alive."""
    return Board(KvBucket(bus, buckets.HEALTH), HealthChanged)


def fault_board(bus: NatsBus) -> Board[FaultReport]:
    """The health-monitor's fault verdicts: which instances are faulty, and what to do with them."""
    return Board(KvBucket(bus, buckets.FAULTS), FaultReport)


def pin_board(bus: NatsBus) -> Board[Pin]:
    """The leading master's list of pinned prefixes, whose KV must not be evicted.

    The list contains names of blocks, and no tokens.
    """
    return Board(KvBucket(bus, buckets.PINS), Pin)


def adapter_board(bus: NatsBus) -> Board[RegisteredAdapter]:
    """The leading master's list of LoRA adapters, by name."""
    return Board(KvBucket(bus, buckets.ADAPTERS), RegisteredAdapter)


def out_of_service_board(bus: NatsBus) -> Board[OutOfService]:
    """The leading master's list of instances that are out of service.

    No heartbeat, incarnation or restart puts an instance back.
    """
    return Board(KvBucket(bus, buckets.OUT_OF_SERVICE), OutOfService)
