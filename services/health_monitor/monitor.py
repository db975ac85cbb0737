"""Finds out which processes are alive, and publishes each change.

The core `HealthTracker` decides, from records of the registry, heartbeats and time. Its verdicts
are published as events, and written to the health board, a key-value bucket in NATS. A verdict that
could not be written is written at the next tick.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import structlog

from pdmesh.core.health import liveness as health
from pdmesh.core.health.liveness import Health, HealthTracker
from pdmesh.core.model import Tick
from pdmesh.errors import InvalidRequest, Unavailable
from pdmesh.events.v1.events_pb2 import HealthChanged, InstanceHealth
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import decode_event
from pdmesh.net.mesh_link import MeshLink
from pdmesh.net.nats.board import Board
from pdmesh.net.registry import RecordChanged
from pdmesh.net.tasks import together
from pdmesh.telemetry import metrics, names

log = structlog.get_logger(__name__)

_TICKS_PER_LEASE: Final = 6
_LOG_EVENTS: Final = {
    Health.HEALTHY.value: "instance.healthy",
    Health.SUSPECT.value: "instance.suspect",
    Health.DEAD.value: "instance.lost",
}

_changes = metrics.counter(names.HEALTH_CHANGES, "Verdicts that changed, by new health")


class HealthMonitor:
    def __init__(
        self,
        link: MeshLink,
        board: Board[HealthChanged],
        *,
        lease_s: float,
        forget_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tracker = HealthTracker(lease_s)
        self._bus, self._view, self._publisher = link.bus, link.view, link.publisher
        self._board = board
        self._lease_s, self._forget_s, self._clock = lease_s, forget_s, clock
        # The number of processes bounds the length of this queue.
        self._announcements: asyncio.Queue[HealthChanged] = asyncio.Queue()
        self._unwritten: dict[str, HealthChanged | None] = {}  # None means to remove the verdict
        self._dead_since: dict[str, float] = {}

    async def run(self) -> None:
        """Runs until cancelled."""
        subscription = await self._bus.subscribe(
            subjects.health_instance(), self._on_heartbeat, on_gap=self._on_gap
        )
        undo = (
            self._bus.on_lost(lambda: self._step(health.BusLost())),
            self._bus.on_restored(lambda: self._step(health.BusRestored())),
        )
        try:
            self._start(await self._board.read())
            await together(self._tick_often(), self._announce())
        finally:
            for each in undo:
                each()
            await subscription.unsubscribe()

    def _start(self, verdicts: dict[str, HealthChanged]) -> None:
        """Take over from an earlier health-monitor, which wrote `verdicts`.

        A process with a verdict but without a record is dead.
        """
        self._view.on_change(self._on_record)
        for record in tuple(self._view.records.values()):
            self._step(health.RecordSeen(record.instance_id, record.incarnation, record.service))
        for instance_id, verdict in verdicts.items():
            if instance_id not in self._view.records:
                self._dead_since[instance_id] = self._clock()
                if verdict.to_health != Health.DEAD.value:
                    verdict.from_health, verdict.to_health = verdict.to_health, Health.DEAD.value
                    verdict.cause = "lease_expired"
                    self._announcements.put_nowait(verdict)

    def _on_record(self, change: RecordChanged) -> None:
        record = change.record
        if record is None:
            self._step(health.RecordVanished(change.instance_id, change.is_lease_end))
        else:
            self._step(health.RecordSeen(record.instance_id, record.incarnation, record.service))

    async def _on_heartbeat(self, message: Message) -> None:
        try:
            event = decode_event(message, InstanceHealth)
        except InvalidRequest as exc:
            log.warning("health.bad_event", error=exc.message)
            return
        self._step(health.Heartbeat(event.header.publisher_id, event.header.incarnation))

    def _on_gap(self) -> None:
        self._step(health.BusRestored())

    def _step(self, event: health.Event) -> None:
        for change in self.tracker.handle(event, self._clock()):
            self._announcements.put_nowait(_to_proto(change))

    async def _tick_often(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / _TICKS_PER_LEASE)
            self._step(Tick())
            self._forget_old()
            await self._write_board()

    def _forget_old(self) -> None:
        now = self._clock()
        over = [i for i, at in self._dead_since.items() if now - at > self._forget_s]
        for instance_id in over:
            del self._dead_since[instance_id]
            self._unwritten[instance_id] = None

    async def _announce(self) -> None:
        while True:
            change = await self._announcements.get()
            _changes.add(1, {names.ATTR_OUTCOME: change.to_health})
            is_bad = change.to_health != Health.HEALTHY.value and change.cause != "deregistered"
            (log.warning if is_bad else log.info)(
                _LOG_EVENTS[change.to_health],
                instance_id=change.instance_id,
                cause=change.cause,
                silent_s=round(change.silent_s, 2),
            )
            self._note(change)
            await self._publisher.publish(subjects.health_changed(change.instance_id), change)
            await self._write_board()

    def _note(self, change: HealthChanged) -> None:
        self._unwritten[change.instance_id] = change
        if change.to_health == Health.DEAD.value:
            self._dead_since[change.instance_id] = self._clock()
        else:
            self._dead_since.pop(change.instance_id, None)

    async def _write_board(self) -> None:
        for instance_id in list(self._unwritten):
            change = self._unwritten.pop(instance_id)
            try:
                if change is None:
                    await self._board.forget(instance_id)
                else:
                    await self._board.write(instance_id, change)
            except Unavailable as exc:
                self._unwritten.setdefault(instance_id, change)
                log.debug("health.board_unavailable", error=exc.message)
                return


def _to_proto(change: health.HealthChanged) -> HealthChanged:
    return HealthChanged(
        instance_id=change.instance_id,
        instance_incarnation=change.incarnation,
        service=change.service,
        from_health=change.before.value if change.before else "",
        to_health=change.after.value,
        cause=change.cause,
        silent_s=change.silent_s,
    )
