"""What one service judges, where everybody can read it: a JetStream bucket with one message in JSON per instance.

Entries outlive their writer: the last ones stand until another one writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

import structlog
from google.protobuf.json_format import Parse, ParseError
from google.protobuf.message import Message

from pdmesh.events.v1.events_pb2 import FaultReport, HealthChanged
from pdmesh.net.event_json import to_json
from pdmesh.net.nats_bus import NatsBus
from pdmesh.net.nats_kv import KvBucket, KvEntry, KvWatch
from pdmesh.v1.admin_service_pb2 import Hold

log = structlog.get_logger(__name__)


M = TypeVar("M", bound=Message)


class Board(Generic[M]):
    """`kind` has a field `instance_id`, which is its key."""

    def __init__(self, bus: NatsBus, bucket: str, kind: type[M]) -> None:
        self._bucket, self._kind = KvBucket(bus, bucket), kind

    async def write(self, instance_id: str, message: M) -> None:
        """Raises Unavailable."""
        await self._bucket.put(instance_id, to_json(message))

    async def forget(self, instance_id: str) -> None:
        """Raises Unavailable."""
        await self._bucket.delete(instance_id)

    def watch(
        self, on_entry: Callable[[M], None], on_gone: Callable[[str], None] = lambda _: None
    ) -> BoardView[M]:
        return BoardView(self._bucket, self._kind, on_entry, on_gone)


class BoardView(Generic[M]):
    """Hands out every entry there is, then each new one; all of them again after an outage."""

    def __init__(
        self,
        bucket: KvBucket,
        kind: type[M],
        on_entry: Callable[[M], None],
        on_gone: Callable[[str], None],
    ) -> None:
        self._kind, self._on_known, self._on_gone = kind, on_entry, on_gone
        self.known: dict[str, M] = {}
        self.loaded = asyncio.Event()
        self._watch: KvWatch = bucket.watch(self._on_entry, self.loaded.set, lambda: None)

    async def close(self) -> None:
        await self._watch.close()

    def _on_entry(self, entry: KvEntry) -> None:
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
    """The health-monitor's verdicts: who is alive."""
    return Board(bus, "pdmesh-health", HealthChanged)


def fault_board(bus: NatsBus) -> Board[FaultReport]:
    """The health-monitor's judgements: who is faulty, and what is to be done."""
    return Board(bus, "pdmesh-faults", FaultReport)


def hold_board(bus: NatsBus) -> Board[Hold]:
    """The leading master's list of instances kept out of service. No heartbeat, incarnation or restart lifts a hold."""
    return Board(bus, "pdmesh-holds", Hold)
