"""The registry in JetStream: one record per process, which expires unless its owner renews it.

A record expires `lease_s` after its last renewal. A new incarnation (a later process with the same
id) takes over the id at once. The next renewal of the earlier incarnation then fails, because the
record has another revision.

After an outage of the server, a view reports no process as dead for one lease and a margin, because
the owners could not renew their records (F18). In a cluster, the bucket may refuse writes for
seconds while its replicas elect a leader, although every server answers. Afterwards all records
seem to have expired. A process notices this state because it cannot renew its own record.

The server does not report the expiry of a record (`lease_ends`). A view therefore asks for each
record that was not renewed for a lease. A new view may show a dead process for one lease longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Final

import structlog
from google.protobuf.json_format import MessageToJson, Parse, ParseError

from pdmesh.errors import Unavailable
from pdmesh.net.nats.buckets import INSTANCES
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.kv_bucket import KvBucket, KvEntry, WrongRevision
from pdmesh.net.nats.lease_ends import LeaseEnds
from pdmesh.net.registry import RecordChanged
from pdmesh.net.tasks import end
from pdmesh.v1.common_pb2 import InstanceRecord

log = structlog.get_logger(__name__)

WATCHER_LEASE_S: Final = 3.0  # the lease that tools assume; they only watch
_MARGIN_S: Final = 0.5  # the time that an owner needs to notice that the server is back
_RETRY_S: Final = 0.25
_TICK_S: Final = 0.1


class NatsRegistry:
    """Implements `Registry`. `lease_s` must be the same for all processes of a mesh."""

    def __init__(self, bus: NatsBus, lease_s: float) -> None:
        self._bus = bus
        self._lease_s = lease_s
        self._bucket = KvBucket(bus, INSTANCES, ttl_s=lease_s)
        self._store = _Store(bus)

    async def register(self, record: InstanceRecord) -> NatsLease:
        """Take the id, even from another incarnation. Waits if the store is unreachable."""
        lease = NatsLease(self._store, self._bucket, record, self._lease_s)
        while True:
            try:
                await self._bucket.ensure()
                await lease.take()
                return lease
            except Unavailable as exc:
                log.warning("registry.unavailable", error=exc.message)
                await asyncio.sleep(_RETRY_S)

    async def watch(self) -> NatsRegistryView:
        """A view with all present records. Waits if the store is unreachable."""
        view = NatsRegistryView(self._store, self._bucket, self._lease_s)
        await view.loaded.wait()
        return view


class _Store:
    """Whether the bucket accepts this process's writes, and since when."""

    def __init__(self, bus: NatsBus) -> None:
        self.bus = bus
        self._is_refusing = False
        self._taken_since = 0.0

    @property
    def is_up(self) -> bool:
        return self.bus.is_connected and not self._is_refusing

    @property
    def stable_since(self) -> float:
        """The monotonic time since which the bucket has been up. Valid while it is up."""
        return max(self.bus.stable_since, self._taken_since)

    def took(self) -> None:
        if self._is_refusing:
            self._is_refusing, self._taken_since = False, time.monotonic()

    def refused(self) -> None:
        if not self._is_refusing and self.bus.is_connected:
            log.warning("registry.no_writes")
        self._is_refusing = True


class NatsLease:
    """Implements `RecordLease`."""

    def __init__(
        self, store: _Store, bucket: KvBucket, record: InstanceRecord, lease_s: float
    ) -> None:
        self._store, self._bucket = store, bucket
        self._record = _copy(record)
        self._lease_s = lease_s
        self._revision = 0
        self._renewed_at = float("-inf")
        self._was_replaced = False
        self._wake = asyncio.Event()
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._forget = store.bus.on_restored(self._wake.set)

    @property
    def is_held(self) -> bool:
        return not self._was_replaced and time.monotonic() - self._renewed_at < self._lease_s

    @property
    def was_replaced(self) -> bool:
        return self._was_replaced

    async def take(self) -> None:
        """Register for the first time. Raises Unavailable."""
        async with self._lock:
            while True:
                found = await self._bucket.get(self._record.instance_id)
                self._revision = found.revision if found else 0
                with contextlib.suppress(WrongRevision):
                    await self._write()
                    break
        name = f"lease-{self._record.instance_id}"
        self._task = asyncio.create_task(self._keep(), name=name)

    async def update(self, record: InstanceRecord) -> None:
        self._record = _copy(record)
        with contextlib.suppress(Unavailable):
            await self._renew()

    async def release(self) -> None:
        self._forget()
        if self._task is not None:
            await end([self._task])
        self._store.took()  # after this, no renewal would show that the bucket accepts writes
        if self._was_replaced:
            return
        self._renewed_at = float("-inf")
        with contextlib.suppress(Unavailable, WrongRevision):
            await self._bucket.delete(self._record.instance_id, last=self._revision)

    async def _keep(self) -> None:
        wait_s = self._lease_s / 3
        while not self._was_replaced:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self._renew()
                wait_s = self._lease_s / 3
            except Unavailable:
                wait_s = _RETRY_S

    async def _renew(self) -> None:
        async with self._lock:
            try:
                while not self._was_replaced:
                    try:
                        await self._write()
                        break
                    except WrongRevision:
                        await self._reconcile()
            except Unavailable:
                self._store.refused()
                raise
            self._store.took()

    async def _reconcile(self) -> None:
        """Read the record again after its revision has changed.

        The record has expired, was wiped, or has a new owner. Or the answer to our last write was
        lost.
        """
        found = await self._bucket.get(self._record.instance_id)
        self._revision = found.revision if found else 0
        owner = _parse(found) if found else None
        if owner is not None and owner.incarnation != self._record.incarnation:
            self._was_replaced = True
            log.warning("registry.replaced", instance_id=self._record.instance_id)

    async def _write(self) -> None:
        value = MessageToJson(self._record, indent=None).encode()
        asked_at = time.monotonic()
        self._revision = await self._bucket.put(
            self._record.instance_id, value, last=self._revision
        )
        self._renewed_at = asked_at


class NatsRegistryView:
    """Implements `RegistryView`."""

    def __init__(self, store: _Store, bucket: KvBucket, lease_s: float) -> None:
        self._store, self._bucket = store, bucket
        self._grace_s = lease_s + _MARGIN_S
        self._ends = LeaseEnds(lease_s, _RETRY_S)
        self._records: dict[str, InstanceRecord] = {}
        self._missing: dict[str, None] = {}  # ids whose records have expired; not reported yet
        self._unseen: set[str] = set()  # known ids that the reopened watch has not shown yet
        self._callbacks: list[Callable[[RecordChanged], None]] = []
        self.loaded = asyncio.Event()
        self._watch = bucket.watch(self._on_entry, self._on_loaded, self._on_reset)
        self._task = asyncio.create_task(self._judge_often(), name="registry-view")

    @property
    def is_connected(self) -> bool:
        return self._watch.is_live

    @property
    def records(self) -> Mapping[str, InstanceRecord]:
        return self._records

    def on_change(self, callback: Callable[[RecordChanged], None]) -> None:
        self._callbacks.append(callback)

    async def close(self) -> None:
        await end([self._task])
        await self._watch.close()

    def _on_reset(self) -> None:
        self._unseen = set(self._records)
        self._ends.clear()

    def _on_entry(self, entry: KvEntry) -> None:
        self._unseen.discard(entry.key)
        if entry.value is None:
            self._ends.ended(entry.key)
        else:
            self._ends.renewed(entry.key, entry.revision, time.monotonic())
        record = _parse(entry)
        if record is not None:
            self._appeared(entry.key, record)
        elif entry.is_expired:
            self._expired(entry.key)
        else:
            self._vanished(entry.key, is_lease_end=False)

    def _on_loaded(self) -> None:
        for instance_id in sorted(self._unseen):
            self._expired(instance_id)
        self._unseen.clear()
        self.loaded.set()

    def _appeared(self, instance_id: str, record: InstanceRecord) -> None:
        self._missing.pop(instance_id, None)
        if self._records.get(instance_id) != record:
            self._records[instance_id] = record
            self._notify(RecordChanged(instance_id, record))

    def _expired(self, instance_id: str) -> None:
        if instance_id in self._records:
            self._missing[instance_id] = None
            self._judge()

    def _vanished(self, instance_id: str, *, is_lease_end: bool) -> None:
        self._missing.pop(instance_id, None)
        if self._records.pop(instance_id, None) is not None:
            self._notify(RecordChanged(instance_id, None, is_lease_end))

    async def _judge_often(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                await self._ask_for_ended()
                if self._missing:
                    self._judge()
            except Exception:  # a listener failed; later changes must still be reported
                log.exception("registry.listener_failed")

    async def _ask_for_ended(self) -> None:
        """Ask the store for each record that was not renewed for a lease.

        Does nothing while the watch is not live. When the watch becomes live, it shows all records.
        """
        if not self._watch.is_live:
            return
        for key, revision in self._ends.due(time.monotonic()).items():
            try:
                found = await self._bucket.get(key)
            except Unavailable:
                return  # the records are due again soon
            if not self._ends.is_last(key, revision):
                continue
            if found is None:
                self._ends.ended(key)
                self._expired(key)
            elif found.revision > revision:  # the owner has renewed it, and the watch is late
                self._ends.renewed(key, revision, time.monotonic())

    def _judge(self) -> None:
        """Report expired records, unless the store was down within the last lease and margin."""
        stable_s = time.monotonic() - self._store.stable_since
        if self._store.is_up and stable_s > self._grace_s:
            for instance_id in tuple(self._missing):
                self._vanished(instance_id, is_lease_end=True)

    def _notify(self, change: RecordChanged) -> None:
        """Call every listener. If any failed, raise the first error after that."""
        failed: Exception | None = None
        for callback in self._callbacks:
            try:
                callback(change)
            except Exception as exc:  # noqa: BLE001 -- raised below, after all calls
                failed = failed or exc
        if failed is not None:
            raise failed


def _parse(entry: KvEntry) -> InstanceRecord | None:
    if entry.value is None:
        return None
    try:
        return Parse(entry.value, InstanceRecord(), ignore_unknown_fields=True)
    except ParseError:
        log.warning("registry.bad_record", key=entry.key)
        return None


def _copy(record: InstanceRecord) -> InstanceRecord:
    copy = InstanceRecord()
    copy.CopyFrom(record)
    return copy
