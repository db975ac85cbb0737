"""Makes a process visible to the mesh: a record in the registry, and heartbeats.

Every service process does this. Its record is under a lease, and it sends a heartbeat every third
of the lease. The process continues without NATS. It should end if another incarnation (a later
process with the same id) replaces it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

import structlog

from pdmesh.events.v1.events_pb2 import InstanceHealth
from pdmesh.net import subjects
from pdmesh.net.events import EventPublisher
from pdmesh.net.registry import RecordLease, Registry
from pdmesh.net.tasks import end
from pdmesh.v1.common_pb2 import InstanceRecord

log = structlog.get_logger(__name__)

_BEATS_PER_LEASE: Final = 3


class Presence:
    """Registers the process at `start` and deregisters it at `stop`.

    `record_fn` is called at every heartbeat, and a changed record is written at once. `on_replaced`
    is called once, when another incarnation has taken the id. `describe` may add fields to each
    heartbeat.
    """

    def __init__(
        self,
        registry: Registry,
        publisher: EventPublisher,
        *,
        lease_s: float,
        is_ready: Callable[[], bool] = lambda: True,
        on_replaced: Callable[[], None] = lambda: None,
    ) -> None:
        self.describe: Callable[[InstanceHealth], None] = lambda _: None
        self._registry = registry
        self._publisher = publisher
        self._period_s = lease_s / _BEATS_PER_LEASE
        self._is_ready = is_ready
        self._on_replaced = on_replaced
        self._lease: RecordLease | None = None
        self._record = InstanceRecord()
        self._record_fn: Callable[[], InstanceRecord] = InstanceRecord
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_held(self) -> bool:
        return self._lease is not None and self._lease.is_held

    async def start(self, record_fn: Callable[[], InstanceRecord]) -> None:
        """Register, and start to send heartbeats. Waits if the store is unreachable."""
        self._record_fn = record_fn
        self._record = _snapshot(record_fn())
        self._lease = await self._registry.register(self._record)
        log.info("presence.registered", instance_id=self._record.instance_id)
        self._task = asyncio.create_task(self._beat_often(self._lease), name="presence")

    async def watch(self) -> None:
        """Wait until the heartbeats end. Raises the error that ended them, if any.

        The process should then end, because the mesh takes an instance without heartbeats for dead.
        """
        if self._task is not None:
            await asyncio.wait([self._task])
            if not self._task.cancelled():
                self._task.result()

    def refresh(self) -> None:
        """Publish a changed record now, not at the next heartbeat."""
        self._wake.set()

    async def stop(self) -> None:
        if self._task is not None:
            await end([self._task])
        if self._lease is not None:
            await self._lease.release()

    async def _beat_often(self, lease: RecordLease) -> None:
        while not lease.was_replaced:
            await self._beat(lease)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._period_s):
                    await self._wake.wait()
            self._wake.clear()
        log.error("presence.replaced", instance_id=self._record.instance_id)
        self._on_replaced()

    async def _beat(self, lease: RecordLease) -> None:
        record = self._record_fn()
        if record != self._record:
            self._record = _snapshot(record)
            await lease.update(self._record)
        health = InstanceHealth(
            service=record.service, is_ready=self._is_ready(), is_draining=record.is_draining
        )
        self.describe(health)
        await self._publisher.publish(subjects.health_instance(record.instance_id), health)


def _snapshot(record: InstanceRecord) -> InstanceRecord:
    copy = InstanceRecord()
    copy.CopyFrom(record)
    return copy
