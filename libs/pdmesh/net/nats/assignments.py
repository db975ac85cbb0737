"""Stores assignments in the JetStream bucket `pdmesh-assignments`.

An assignment is the leading master's order to one instance. The bucket has one key per instance,
with the assignment in protobuf's JSON. Its entries do not expire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import NoReturn

import structlog
from google.protobuf.json_format import MessageToJson, Parse, ParseError

from pdmesh.errors import NotLeader
from pdmesh.net.assignments import OnAssignment, StaleView
from pdmesh.net.nats.buckets import ASSIGNMENTS
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.kv_bucket import KvBucket, KvEntry, WrongRevision
from pdmesh.v1.groups_pb2 import Assignment

log = structlog.get_logger(__name__)


class NatsAssignments:
    """Implements `Assignments`."""

    def __init__(self, bus: NatsBus) -> None:
        self._bucket = KvBucket(bus, ASSIGNMENTS)

    async def book(self) -> NatsAssignmentBook:
        book = NatsAssignmentBook(self._bucket)
        await book.loaded.wait()
        return book

    def follow(self, instance_id: str, on_assignment: OnAssignment) -> NatsAssignmentFeed:
        return NatsAssignmentFeed(self._bucket, instance_id, on_assignment)


class NatsAssignmentBook:
    """Implements `AssignmentBook`."""

    def __init__(self, bucket: KvBucket) -> None:
        self._bucket = bucket
        self._known: dict[str, Assignment] = {}
        self._revisions: dict[str, int] = {}  # by key, as last seen; includes removed keys
        self._unseen: set[str] = set()  # known keys that the reopened watch has not shown yet
        self._callbacks: list[Callable[[], None]] = []
        self.loaded = asyncio.Event()
        self._watch = bucket.watch(self._on_entry, self._on_loaded, self._on_reset)

    @property
    def is_current(self) -> bool:
        return self._watch.is_live

    @property
    def known(self) -> Mapping[str, Assignment]:
        return self._known

    def on_change(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    async def write(self, assignment: Assignment) -> None:
        key = assignment.instance_id
        self._refuse_older(key, assignment.epoch)
        copy = Assignment()
        copy.CopyFrom(assignment)
        value = MessageToJson(copy, indent=None).encode()
        try:
            revision = await self._bucket.put(key, value, last=self._revisions.get(key, 0))
        except WrongRevision:
            await self._read_again(key, assignment.epoch)
        self._revisions[key], self._known[key] = revision, copy

    async def forget(self, instance_id: str, epoch: int) -> None:
        if instance_id not in self._known:
            return
        self._refuse_older(instance_id, epoch)
        try:
            revision = await self._bucket.delete(instance_id, last=self._revisions[instance_id])
        except WrongRevision:
            await self._read_again(instance_id, epoch)
        self._revisions[instance_id] = revision
        self._known.pop(instance_id, None)

    async def close(self) -> None:
        await self._watch.close()

    def _refuse_older(self, key: str, epoch: int) -> None:
        known = self._known.get(key)
        if known is not None and known.epoch > epoch:
            raise NotLeader(f"epoch {known.epoch} has assigned {key} since")

    async def _read_again(self, key: str, epoch: int) -> NoReturn:
        found = await self._bucket.get(key)
        if found is not None:
            self._take(found)
        else:  # the bucket was wiped
            self._revisions.pop(key, None)
            self._known.pop(key, None)
        self._refuse_older(key, epoch)
        raise StaleView(key)

    def _on_reset(self) -> None:
        self._unseen = set(self._revisions)

    def _on_entry(self, entry: KvEntry) -> None:
        is_reopening = entry.key in self._unseen
        self._unseen.discard(entry.key)
        is_echo = entry.revision <= self._revisions.get(entry.key, 0)
        if not is_echo or is_reopening:
            self._take(entry)
            self._notify()

    def _on_loaded(self) -> None:
        for key in self._unseen:  # the bucket was wiped
            self._revisions.pop(key, None)
            self._known.pop(key, None)
        if self._unseen:
            self._unseen.clear()
            self._notify()
        self.loaded.set()

    def _take(self, entry: KvEntry) -> None:
        self._revisions[entry.key] = entry.revision
        assignment = _parse(entry)
        if assignment is None:
            self._known.pop(entry.key, None)
        else:
            self._known[entry.key] = assignment

    def _notify(self) -> None:
        for callback in self._callbacks:
            callback()


class NatsAssignmentFeed:
    """Implements `AssignmentFeed`."""

    def __init__(self, bucket: KvBucket, instance_id: str, on_assignment: OnAssignment) -> None:
        self._instance_id, self._on_assignment = instance_id, on_assignment
        self._watch = bucket.watch(self._on_entry, lambda: None, lambda: None, key=instance_id)

    async def close(self) -> None:
        await self._watch.close()

    def _on_entry(self, entry: KvEntry) -> None:
        assignment = _parse(entry)
        if assignment is not None and assignment.instance_id == self._instance_id:
            self._on_assignment(assignment)


def _parse(entry: KvEntry) -> Assignment | None:
    if entry.value is None:
        return None
    try:
        return Parse(entry.value, Assignment(), ignore_unknown_fields=True)
    except ParseError:
        log.warning("assignments.bad_value", key=entry.key)
        return None
