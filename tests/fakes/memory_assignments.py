"""A fake of `NatsAssignments` in one process. Contract tests check that both behave alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pdmesh.errors import NotLeader, Unavailable
from pdmesh.net.assignments import OnAssignment, StaleView
from pdmesh.v1.groups_pb2 import Assignment


@dataclass
class MemoryAssignmentStore:
    """The store that all parties of a test share.

    As over a network, changes arrive at a later turn of the event loop.
    """

    values: dict[str, tuple[int, Assignment | None]] = field(default_factory=dict)
    books: list[MemoryAssignmentBook] = field(default_factory=list)
    feeds: list[MemoryAssignmentFeed] = field(default_factory=list)
    revision: int = 0
    is_up: bool = True

    def put(self, key: str, assignment: Assignment | None, last: int) -> int:
        if not self.is_up:
            raise Unavailable("the store is away")
        if self.values.get(key, (0, None))[0] != last:
            raise StaleView(key)
        self.revision += 1
        self.values[key] = (self.revision, assignment)
        loop = asyncio.get_running_loop()
        for reader in self._readers():
            loop.call_soon(reader.tell, key)
        return self.revision

    def _readers(self) -> list[MemoryAssignmentBook | MemoryAssignmentFeed]:
        return [*self.books, *self.feeds]

    def come_back(self) -> None:
        self.is_up = True
        for reader in self._readers():
            for key in self.values:
                reader.tell(key)


class MemoryAssignments:
    def __init__(self, store: MemoryAssignmentStore) -> None:
        self._store = store

    async def book(self) -> MemoryAssignmentBook:
        return MemoryAssignmentBook(self._store)

    def follow(self, instance_id: str, on_assignment: OnAssignment) -> MemoryAssignmentFeed:
        return MemoryAssignmentFeed(self._store, instance_id, on_assignment)


class MemoryAssignmentBook:
    def __init__(self, store: MemoryAssignmentStore) -> None:
        self._store = store
        self._seen = dict(store.values)
        self._callbacks: list[Callable[[], None]] = []
        store.books.append(self)

    @property
    def is_current(self) -> bool:
        return self._store.is_up

    @property
    def known(self) -> Mapping[str, Assignment]:
        return {key: a for key, (_, a) in self._seen.items() if a is not None}

    def on_change(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    async def write(self, assignment: Assignment) -> None:
        copy = Assignment()
        copy.CopyFrom(assignment)
        self._put(copy.instance_id, copy, copy.epoch)

    async def forget(self, instance_id: str, epoch: int) -> None:
        if instance_id in self.known:
            self._put(instance_id, None, epoch)

    async def close(self) -> None:
        self._store.books.remove(self)

    def tell(self, key: str) -> None:
        if self._store.is_up and self._seen.get(key) != self._store.values[key]:
            self._seen[key] = self._store.values[key]
            for callback in self._callbacks:
                callback()

    def _put(self, key: str, assignment: Assignment | None, epoch: int) -> None:
        self._refuse_older(key, epoch)
        try:
            last = self._seen.get(key, (0, None))[0]
            self._seen[key] = (self._store.put(key, assignment, last), assignment)
        except StaleView:
            self._seen[key] = self._store.values[key]
            self._refuse_older(key, epoch)
            raise

    def _refuse_older(self, key: str, epoch: int) -> None:
        known = self._seen.get(key, (0, None))[1]
        if known is not None and known.epoch > epoch:
            raise NotLeader(f"epoch {known.epoch} has assigned {key} since")


class MemoryAssignmentFeed:
    def __init__(
        self, store: MemoryAssignmentStore, instance_id: str, on_assignment: OnAssignment
    ) -> None:
        self._store, self._instance_id, self._tell = store, instance_id, on_assignment
        store.feeds.append(self)
        if instance_id in store.values:
            asyncio.get_running_loop().call_soon(self.tell, instance_id)

    async def close(self) -> None:
        self._store.feeds.remove(self)

    def tell(self, key: str) -> None:
        if key != self._instance_id or not self._store.is_up:
            return
        assignment = self._store.values[key][1]
        if assignment is not None:
            self._tell(assignment)
