"""Feeds the fleet core: records, load reports, and the health-monitor's verdicts and fault reports.

Everything is delivered again after an outage, so nothing here remembers what it missed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import structlog

from pdmesh.core.groups.observed import GroupTracker
from pdmesh.core.health.fault_levels import level_of
from pdmesh.core.health.liveness import Health
from pdmesh.core.placement.fleet import (
    FaultForgotten,
    Fleet,
    HealthJudged,
    InstanceRecorded,
    InstanceUnrecorded,
    JudgeLost,
    LoadReported,
    PrefillComputed,
)
from pdmesh.core.placement.instance import FaultJudged
from pdmesh.errors import InvalidRequest
from pdmesh.events.v1.events_pb2 import FaultReport, GroupChanged, HealthChanged, InstanceLoad
from pdmesh.net import subjects
from pdmesh.net.bus import Bus, Message, Subscription
from pdmesh.net.events import EventOrder, EventPublisher, SequenceGate, decode_event
from pdmesh.net.nats.board import Board, BoardView
from pdmesh.net.registry import RecordChanged, RegistryView
from pdmesh.net.tasks import together
from pdmesh.services.master_scheduler.placement.convert import identity_from

log = structlog.get_logger(__name__)

_JUDGE: Final = "health-monitor"
_JUDGE_AWAY_S: Final = 10.0  # a restart takes less


class FleetFeed:
    """`is_leader` says whether this process may announce groups."""

    def __init__(
        self,
        fleet: Fleet,
        groups: GroupTracker,
        bus: Bus,
        view: RegistryView,
        board: Board[HealthChanged],
        faults: Board[FaultReport],
        publisher: EventPublisher,
        is_leader: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._groups = fleet, groups
        self._bus, self._view, self._publisher = bus, view, publisher
        self._board, self._faults = board, faults
        self._is_leader, self._clock = is_leader, clock
        self._gate = SequenceGate()
        self._subscription: Subscription | None = None
        self._views: list[BoardView[HealthChanged] | BoardView[FaultReport]] = []
        self._has_changed = asyncio.Event()
        self._judge_seen_at = clock()
        self._is_judge_lost = False

    async def run(self) -> None:
        """Until cancelled."""
        self._view.on_change(self._on_record)
        for record in tuple(self._view.records.values()):
            self._on_record(RecordChanged(record.instance_id, record))
        self._views = [
            self._board.watch(self._on_verdict),
            self._faults.watch(self._on_fault, self._on_fault_gone),
        ]
        self._subscription = await self._bus.subscribe(subjects.instance_load(), self._on_load)
        try:
            await together(self._announce_groups(), self._mind_the_judge())
        finally:
            await self._subscription.unsubscribe()
            for each in self._views:
                await each.close()

    def wake(self) -> None:
        """Our leadership changed: announce what was not announced."""
        self._has_changed.set()

    def _on_record(self, change: RecordChanged) -> None:
        if change.record is None:
            self._fleet.handle(InstanceUnrecorded(change.instance_id), self._clock())
            self._gate.forget(change.instance_id)
        elif identity := identity_from(change.record):
            self._fleet.handle(InstanceRecorded(identity), self._clock())
        self._has_changed.set()

    def _on_verdict(self, verdict: HealthChanged) -> None:
        try:
            health = Health(verdict.to_health)
        except ValueError:
            log.warning("fleet.bad_verdict", instance_id=verdict.instance_id)
            return
        self._is_judge_lost = False
        judged = HealthJudged(verdict.instance_id, verdict.instance_incarnation, health)
        self._fleet.handle(judged, self._clock())
        self._has_changed.set()

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
        self._has_changed.set()

    def _on_fault_gone(self, instance_id: str) -> None:
        self._fleet.handle(FaultForgotten(instance_id), self._clock())

    async def _on_load(self, message: Message) -> None:
        try:
            event = decode_event(message, InstanceLoad)
        except InvalidRequest as exc:
            log.warning("fleet.bad_event", error=exc.message)
            return
        if self._gate.admit(event.header) is EventOrder.STALE:
            return  # a gap does no harm: each report holds the whole load
        self._fleet.handle(
            LoadReported(
                event.header.publisher_id,
                event.header.incarnation,
                event.num_slots,
                event.num_slots_used,
                event.num_kv_blocks_free,
                event.is_draining,
                event.admitted_request_ids,
                [
                    PrefillComputed(c.request_id, c.num_tokens, c.num_cached_tokens, c.seconds)
                    for c in event.computed
                ],
            ),
            self._clock(),
        )

    async def _announce_groups(self) -> None:
        while True:
            await self._has_changed.wait()
            self._has_changed.clear()
            if not self._is_leader():
                continue  # `wake` comes with the leadership: a new leader announces what it finds
            for change in self._groups.observe(self._fleet.instances.values()):
                await self._publisher.publish(
                    subjects.group_changed(change.group_id),
                    GroupChanged(
                        group_id=change.group_id,
                        scenario=change.scenario,
                        prefill_ids=change.prefill_ids,
                        decode_ids=change.decode_ids,
                        fusion_ids=change.fusion_ids,
                    ),
                )

    async def _mind_the_judge(self) -> None:
        """Notice a lost health-monitor: without one, no suspicion would ever be cleared."""
        while True:
            now = self._clock()
            is_there = any(r.service == _JUDGE for r in self._view.records.values())
            if is_there or not self._view.is_connected:
                self._judge_seen_at = now
            elif now - self._judge_seen_at > _JUDGE_AWAY_S and not self._is_judge_lost:
                self._is_judge_lost = True
                log.warning("fleet.judge_lost")
                self._fleet.handle(JudgeLost(), now)
                self._has_changed.set()
            await asyncio.sleep(1.0)
