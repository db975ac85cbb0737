"""Watches a mesh from outside all the time, and records what must never happen.

Examples are two leaders, a write with an old epoch, and a wrong pair of prefill and decode. The
witness reads the registry, the bucket of assignments, and the events. While NATS is unreachable,
the witness only checks that two masters never lead at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Self

import grpc
from google.protobuf.json_format import Parse

from pdmesh.events.v1.events_pb2 import RequestFinished
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import decode_event
from pdmesh.net.grpc import rpc
from pdmesh.net.nats.buckets import ASSIGNMENTS
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.kv_bucket import KvBucket, KvEntry
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.net.registry import RecordChanged, takes_requests
from pdmesh.v1.common_pb2 import ROLE_DECODE, ROLE_NONE, ROLE_PREFILL, InstanceRecord
from pdmesh.v1.groups_pb2 import Assignment
from pdmesh.v1.scheduler_service_pb2 import PlanQuery, PlanRequest
from pdmesh.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from tests.chaos.nemesis.plan import MASTERS

_MARGIN_S: Final = 3.0  # because of a watch's latency, a record may be outdated by this time
_PROBE_EVERY_S: Final = 0.4
_MAX_LIVES: Final = 64


@dataclass(frozen=True, slots=True)
class Violation:
    """A breach of `invariant`, which is one of I1 to I9 or a requirement."""

    invariant: str
    what: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.what}"


@dataclass(frozen=True, slots=True)
class Lived:
    """An instance's record from one moment until its next record."""

    since: float
    record: InstanceRecord | None


class Witness:
    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus
        self._found: list[Violation] = []
        self._lives: dict[str, deque[Lived]] = defaultdict(lambda: deque(maxlen=_MAX_LIVES))
        self._given: dict[str, Assignment] = {}
        self._blind_since = 0.0  # when the connection to NATS was last lost or restored
        self.num_pairs = 0
        self.num_leaders_asked = 0

    async def __aenter__(self) -> Self:
        self._view = await NatsRegistry(self._bus, 3.0).watch()
        for instance_id, record in self._view.records.items():
            self._note(instance_id, record)
        self._view.on_change(self._on_record)
        self._bus.on_lost(self._on_blind)
        self._bus.on_restored(self._on_blind)
        self._book = KvBucket(self._bus, ASSIGNMENTS).watch(
            self._on_assignment, lambda: None, lambda: None
        )
        await self._bus.subscribe(subjects.request_finished(), self._on_finished)
        self._probe = asyncio.create_task(self._ask_leaders())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._probe.cancel()
        await asyncio.gather(self._probe, return_exceptions=True)
        await self._book.close()
        await self._view.close()

    def take(self) -> list[Violation]:
        """The violations found since the last `take`."""
        found, self._found = self._found, []
        return found

    def forget_assignments(self) -> None:
        """Forget all assignments, because the bucket is about to be wiped."""
        self._given.clear()

    @property
    def records(self) -> dict[str, InstanceRecord]:
        return dict(self._view.records)

    def _on_blind(self) -> None:
        self._blind_since = time.monotonic()

    # --- records ---------------------------------------------------------------------------------

    def _on_record(self, change: RecordChanged) -> None:
        self._note(change.instance_id, change.record)
        if change.record is not None:
            self._check_peers(change.record)

    def _note(self, instance_id: str, record: InstanceRecord | None) -> None:
        copy = None
        if record is not None:
            copy = InstanceRecord()
            copy.CopyFrom(record)
        self._lives[instance_id].append(Lived(time.monotonic(), copy))

    def _during(self, instance_id: str, since: float) -> Iterator[InstanceRecord]:
        """All records that the instance has had since this time."""
        lives = list(self._lives[instance_id])
        for i, lived in enumerate(lives):
            until = lives[i + 1].since if i + 1 < len(lives) else time.monotonic()
            if until >= since and lived.record is not None:
                yield lived.record

    def _check_peers(self, record: InstanceRecord) -> None:
        """Check that only prefills and decodes of one revision are connected (S13, S26)."""
        for peer in record.verified_peers:
            other = self._view.records.get(peer.instance_id)
            if other is None or other.incarnation != peer.incarnation:
                continue
            # An incarnation is blank only before it gets a role, and a connected peer has a role.
            # So this record of a blank peer is outdated.
            if other.role != ROLE_NONE:
                self._check_pair(record, other, "connected")

    def _check_pair(self, one: InstanceRecord, other: InstanceRecord, how: str) -> None:
        if {one.role, other.role} != {ROLE_PREFILL, ROLE_DECODE}:
            self._say("I3", f"{how}: {_brief(one)} and {_brief(other)} have no KV for each other")
        elif (one.revision, one.group_id) != (other.revision, other.group_id):
            self._say("I3", f"{how}: {_brief(one)} and {_brief(other)} of different revisions")

    # --- leaders ---------------------------------------------------------------------------------

    def _on_assignment(self, entry: KvEntry) -> None:
        if entry.value is None:
            self._given.pop(entry.key, None)
            return
        given, before = Parse(entry.value, Assignment()), self._given.get(entry.key)
        if before is not None and given.epoch < before.epoch:
            self._say(
                "I7",
                f"epoch {given.epoch} has assigned {entry.key} after epoch {before.epoch} did",
            )
        self._given[entry.key] = given
        for peer in given.peers:
            other = self._given.get(peer.instance_id)
            if other is None or other.incarnation != peer.incarnation:
                continue
            if {given.role, other.role} != {ROLE_PREFILL, ROLE_DECODE} or (
                given.revision,
                given.group_id,
            ) != (other.revision, other.group_id):
                self._say("I3", f"{entry.key} and {peer.instance_id} are assigned as peers")

    async def _ask_leaders(self) -> None:
        """Check that two masters never lead at once (F12, F13).

        If one master plans, then the other, and then the first again in the same epoch, both lead.
        """
        async with contextlib.AsyncExitStack() as stack:
            channels: dict[str, tuple[str, grpc.aio.Channel]] = {}
            while True:
                for name in MASTERS:
                    record = self._view.records.get(name)
                    if record and channels.get(name, ("",))[0] != record.grpc_address:
                        channel = await stack.enter_async_context(rpc.channel(record.grpc_address))
                        channels[name] = (record.grpc_address, channel)
                if len(channels) == len(MASTERS):
                    one, other = (channels[name][1] for name in MASTERS)
                    epochs = [await _plans(channel) for channel in (one, other, one)]
                    self.num_leaders_asked += 1
                    if all(epochs) and epochs[0] == epochs[2]:
                        self._say("I7", f"both masters lead, in epochs {epochs[0]} and {epochs[1]}")
                await asyncio.sleep(_PROBE_EVERY_S)

    # --- requests --------------------------------------------------------------------------------

    async def _on_finished(self, message: Message) -> None:
        """Check the instances of a finished request.

        Each must have been READY at some time while the request ran. Its prefill and decode must
        have had the same revision and group.
        """
        event = decode_event(message, RequestFinished)
        since = time.monotonic() - event.e2e_ms / 1e3 - _MARGIN_S
        if since < self._blind_since + _MARGIN_S:
            return
        for instance_id in {event.prefill_id, event.decode_id} - {""}:
            records = list(self._during(instance_id, since))
            if not any(takes_requests(record) for record in records):
                phases = sorted({record.phase for record in records})
                self._say(
                    "S19",
                    f"{event.request_id} went to {instance_id}, whose phases were {phases} "
                    "meanwhile",
                )
        if event.outcome != "completed" or event.num_migrations or not event.decode_id:
            return
        self.num_pairs += 1
        cells = [
            _cells(self._during(instance_id, since))
            for instance_id in (event.prefill_id, event.decode_id)
        ]
        if not cells[0] & cells[1]:
            self._say(
                "I3",
                f"{event.request_id}: {event.prefill_id} {cells[0]} and {event.decode_id} "
                f"{cells[1]}",
            )

    def _say(self, invariant: str, what: str) -> None:
        self._found.append(Violation(invariant, what))


def _cells(records: Iterable[InstanceRecord]) -> set[tuple[str, str]]:
    return {(r.group_id, r.revision) for r in records if takes_requests(r)}


def _brief(record: InstanceRecord) -> str:
    return f"{record.instance_id} (role {record.role}, {record.group_id} {record.revision[:8]})"


async def _plans(channel: grpc.aio.Channel) -> int:
    """The epoch in which a master plans. 0 if the master does not plan."""
    query = PlanQuery(request_id="witness", num_prompt_tokens=64, max_tokens=1)
    request = PlanRequest(gateway_id="witness", queries=[query])
    try:
        return int((await SchedulerServiceStub(channel).Plan(request, timeout=1.0)).epoch)
    except grpc.aio.AioRpcError:
        return 0
