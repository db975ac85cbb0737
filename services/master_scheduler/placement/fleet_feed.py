"""Passes news about instances to the core `Fleet`, from which the master ranks instances.

The news comes from the registry's records, load reports, and the health-monitor's verdicts and
fault reports. A missed message does no harm. After an outage of NATS, records, verdicts and fault
reports are delivered again. Instances report their load at least every second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from pdmesh.core.health.fault_levels import FaultJudged, level_of
from pdmesh.core.health.liveness import Health
from pdmesh.core.placement.fleet import (
    FaultForgotten,
    Fleet,
    HealthJudged,
    HealthMonitorLost,
    InstanceRecorded,
    InstanceUnrecorded,
    LoadReported,
    PrefillComputed,
)
from pdmesh.errors import InvalidRequest
from pdmesh.events.v1.events_pb2 import FaultReport, HealthChanged, InstanceLoad
from pdmesh.net import subjects
from pdmesh.net.bus import Bus, Message
from pdmesh.net.event_order import EventOrder, SequenceGate
from pdmesh.net.events import decode_event
from pdmesh.net.nats.board import Board
from pdmesh.net.registry import RecordChanged, RegistryView
from pdmesh.services.master_scheduler.placement.convert import identity_from

log = structlog.get_logger(__name__)

_MONITOR: Final = "health-monitor"
_MONITOR_AWAY_S: Final = 10.0  # longer than the health-monitor's restart takes


@dataclass(frozen=True, slots=True)
class MonitorBoards:
    """The two lists that the health-monitor keeps in NATS: health of instances, and faults."""

    health: Board[HealthChanged]
    faults: Board[FaultReport]


class FleetFeed:
    """`on_change` is called when an instance may have come, gone, or changed its health."""

    def __init__(
        self,
        fleet: Fleet,
        bus: Bus,
        view: RegistryView,
        boards: MonitorBoards,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._bus, self._view, self._boards = fleet, bus, view, boards
        self._on_change, self._clock = on_change, clock
        self._gate = SequenceGate()
        self._monitor_seen_at = clock()
        self._is_monitor_lost = False

    async def run(self) -> None:
        """Runs until cancelled."""
        self._view.on_change(self._on_record)
        for record in tuple(self._view.records.values()):
            self._on_record(RecordChanged(record.instance_id, record))
        views = (
            self._boards.health.watch(self._on_verdict),
            self._boards.faults.watch(self._on_fault, self._on_fault_gone),
        )
        subscription = await self._bus.subscribe(subjects.instance_load(), self._on_load)
        try:
            await self._watch_the_monitor()
        finally:
            await subscription.unsubscribe()
            for each in views:
                await each.close()

    def _on_record(self, change: RecordChanged) -> None:
        if change.record is None:
            self._fleet.handle(InstanceUnrecorded(change.instance_id), self._clock())
            self._gate.forget(change.instance_id)
        elif identity := identity_from(change.record):
            self._fleet.handle(InstanceRecorded(identity), self._clock())
        self._on_change()

    def _on_verdict(self, verdict: HealthChanged) -> None:
        try:
            health = Health(verdict.to_health)
        except ValueError:
            log.warning("fleet.bad_verdict", instance_id=verdict.instance_id)
            return
        self._is_monitor_lost = False
        judged = HealthJudged(verdict.instance_id, verdict.instance_incarnation, health)
        self._fleet.handle(judged, self._clock())
        self._on_change()

    def _on_fault(self, report: FaultReport) -> None:
        judged = FaultJudged(
            report.instance_id,
            report.instance_incarnation,
            level_of(report.level),
            tuple(s.reason for s in report.signals),
            report.held_back,
            report.since.ToMicroseconds() / 1e6,
        )
        self._fleet.handle(judged, self._clock())
        self._on_change()

    def _on_fault_gone(self, instance_id: str) -> None:
        self._fleet.handle(FaultForgotten(instance_id), self._clock())

    async def _on_load(self, message: Message) -> None:
        try:
            event = decode_event(message, InstanceLoad)
        except InvalidRequest as exc:
            log.warning("fleet.bad_event", error=exc.message)
            return
        if self._gate.admit(event.header) is EventOrder.STALE:
            return  # a newer report has already arrived
        self._fleet.handle(load_from(event), self._clock())

    async def _watch_the_monitor(self) -> None:
        """Notice when the health-monitor is lost.

        Without a health-monitor, no suspicion of an instance would ever be cleared. So the fleet
        then counts all instances as healthy and without faults.
        """
        while True:
            now = self._clock()
            is_there = any(r.service == _MONITOR for r in self._view.records.values())
            if is_there or not self._view.is_connected:
                self._monitor_seen_at = now
            elif now - self._monitor_seen_at > _MONITOR_AWAY_S and not self._is_monitor_lost:
                self._is_monitor_lost = True
                log.warning("fleet.monitor_lost")
                self._fleet.handle(HealthMonitorLost(), now)
                self._on_change()
            await asyncio.sleep(1.0)


def load_from(event: InstanceLoad) -> LoadReported:
    return LoadReported(
        event.header.publisher_id,
        event.header.incarnation,
        event.num_slots,
        event.num_slots_used,
        event.num_kv_blocks_free,
        event.is_draining,
        event.admitted_request_ids,
        [
            PrefillComputed(
                c.request_id,
                c.num_tokens,
                c.num_cached_tokens,
                c.seconds,
                c.num_steps,
                c.num_beside if c.HasField("num_beside") else None,
            )
            for c in event.computed
        ],
    )
