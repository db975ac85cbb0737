"""A fake of `NatsRegistry` in one process, with leases on the event loop's clock.

Contract tests check that both registries behave alike.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pdmesh.net.registry import RecordChanged
from pdmesh.v1.common_pb2 import InstanceRecord


@dataclass
class MemoryStore:
    """The store that all registries of a test share.

    While `is_up` is False, nothing is written and no lease ends.
    """

    records: dict[str, InstanceRecord] = field(default_factory=dict)
    views: list[MemoryView] = field(default_factory=list)
    timers: dict[str, asyncio.TimerHandle] = field(default_factory=dict)
    is_up: bool = True

    def write(self, record: InstanceRecord, lease_s: float) -> None:
        instance_id = record.instance_id
        if timer := self.timers.pop(instance_id, None):
            timer.cancel()
        loop = asyncio.get_running_loop()
        self.timers[instance_id] = loop.call_later(lease_s, self._expire, instance_id, lease_s)
        if self.records.get(instance_id) != record:
            self.records[instance_id] = record
            self._tell(RecordChanged(instance_id, record))

    def remove(self, instance_id: str, *, is_lease_end: bool) -> None:
        if timer := self.timers.pop(instance_id, None):
            timer.cancel()
        if self.records.pop(instance_id, None) is not None:
            self._tell(RecordChanged(instance_id, None, is_lease_end))

    def _expire(self, instance_id: str, lease_s: float) -> None:
        if self.is_up:
            self.remove(instance_id, is_lease_end=True)
        else:
            loop = asyncio.get_running_loop()
            self.timers[instance_id] = loop.call_later(lease_s, self._expire, instance_id, lease_s)

    def _tell(self, change: RecordChanged) -> None:
        for view in list(self.views):
            view.tell(change)


class MemoryLease:
    def __init__(self, store: MemoryStore, record: InstanceRecord, lease_s: float) -> None:
        self._store, self._record, self._lease_s = store, _copy(record), lease_s
        self._renewed_at = asyncio.get_running_loop().time()
        self._was_replaced = False
        store.write(self._record, lease_s)
        self.task = asyncio.create_task(self._keep())

    @property
    def is_held(self) -> bool:
        age_s = asyncio.get_running_loop().time() - self._renewed_at
        return not self._was_replaced and age_s < self._lease_s

    @property
    def was_replaced(self) -> bool:
        return self._was_replaced

    async def update(self, record: InstanceRecord) -> None:
        self._record = _copy(record)
        self._renew()

    async def release(self) -> None:
        self.task.cancel()
        if not self._was_replaced and self._store.is_up:
            self._store.remove(self._record.instance_id, is_lease_end=False)
        self._renewed_at = float("-inf")

    async def _keep(self) -> None:
        while not self._was_replaced:
            await asyncio.sleep(self._lease_s / 3)
            self._renew()

    def _renew(self) -> None:
        if not self._store.is_up:
            return
        owner = self._store.records.get(self._record.instance_id)
        if owner is not None and owner.incarnation != self._record.incarnation:
            self._was_replaced = True
        if not self._was_replaced:
            self._store.write(self._record, self._lease_s)
            self._renewed_at = asyncio.get_running_loop().time()


class MemoryView:
    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._records = dict(store.records)
        self._callbacks: list[Callable[[RecordChanged], None]] = []
        store.views.append(self)

    @property
    def is_connected(self) -> bool:
        return self._store.is_up

    @property
    def records(self) -> Mapping[str, InstanceRecord]:
        return self._records

    def on_change(self, callback: Callable[[RecordChanged], None]) -> None:
        self._callbacks.append(callback)

    def tell(self, change: RecordChanged) -> None:
        if change.record is None:
            self._records.pop(change.instance_id, None)
        else:
            self._records[change.instance_id] = change.record
        for callback in self._callbacks:
            callback(change)

    async def close(self) -> None:
        with contextlib.suppress(ValueError):
            self._store.views.remove(self)


class MemoryRegistry:
    def __init__(self, store: MemoryStore | None = None, lease_s: float = 3.0) -> None:
        self.store = store or MemoryStore()
        self._lease_s = lease_s
        self._leases: list[MemoryLease] = []

    async def register(self, record: InstanceRecord) -> MemoryLease:
        lease = MemoryLease(self.store, record, self._lease_s)
        self._leases.append(lease)
        return lease

    async def watch(self) -> MemoryView:
        return MemoryView(self.store)

    def crash(self) -> None:
        """Let the owner die without removing its records. Nothing renews its leases any more."""
        for lease in self._leases:
            lease.task.cancel()


def _copy(record: InstanceRecord) -> InstanceRecord:
    copy = InstanceRecord()
    copy.CopyFrom(record)
    return copy
