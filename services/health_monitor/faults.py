"""Finds out which instances are faulty, and publishes a report on each.

Signals, for example a device error, come from instances, node agents, canary probes and outlier
detection. The core `FaultJudge` turns signals into verdicts. Each verdict becomes a report on the
fault board, a key-value bucket in NATS that masters and gateways read. If a write fails, the next
tick repeats it. After an outage of NATS, all reports are written again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final

import structlog
from google.protobuf import json_format
from google.protobuf.timestamp_pb2 import Timestamp

from pdmesh.core.health.fault_judge import (
    Event,
    FaultJudge,
    Healed,
    InstanceGone,
    InstanceSeen,
    Judged,
    JudgePolicy,
    Signal,
    SignalsHeard,
    SignalsLost,
    SignalsRestored,
)
from pdmesh.core.health.fault_levels import EJECTS_FROM, Level
from pdmesh.core.health.node_status import VOID_AFTER_PERIODS
from pdmesh.core.health.outlier_detection import OutlierDetector
from pdmesh.core.model import Tick
from pdmesh.errors import InvalidRequest, Unavailable
from pdmesh.events.v1.events_pb2 import FaultReport, InstanceHealth, NodeReported
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.convert.fault_signals import signal_from, signal_to, vitals_from
from pdmesh.net.events import decode_event
from pdmesh.net.mesh_link import MeshLink
from pdmesh.net.nats.board import Board
from pdmesh.net.registry import RecordChanged
from pdmesh.telemetry import metrics, names
from pdmesh.v1.admin_service_pb2 import OutOfService
from pdmesh.v1.common_pb2 import (
    ROLE_DECODE,
    ROLE_ENCODER,
    ROLE_FUSION,
    ROLE_POOLING,
    ROLE_PREFILL,
    InstanceRecord,
    Role,
)

log = structlog.get_logger(__name__)

_JUDGED_ROLES: Final = frozenset(
    {ROLE_PREFILL, ROLE_DECODE, ROLE_FUSION, ROLE_POOLING, ROLE_ENCODER}
)
_TICKS_PER_LEASE: Final = 6
_VITALS: Final = "vitals"


class FaultWatch:
    """Passes signals to the judge, and publishes its verdicts.

    `lease_s` is the lease of records in the registry. Instances report three times per lease.
    """

    def __init__(
        self,
        link: MeshLink,
        board: Board[FaultReport],
        out_of_service: Board[OutOfService],
        *,
        lease_s: float,
        policy: JudgePolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.judge = FaultJudge(policy or JudgePolicy())
        self._outliers = OutlierDetector()
        self._bus, self._view, self._publisher = link.bus, link.view, link.publisher
        self._board = board
        self._out_of_service = out_of_service
        self._lease_s, self._clock = lease_s, clock
        self._wall_offset_s = time.time() - clock()
        self._unwritten: dict[str, FaultReport | None] = {}  # None means to remove the report
        self._reported: dict[str, int] = {}  # the incarnation of each instance with a report
        self._inherited: set[str] = set()  # instances with a report by an earlier health-monitor
        self._inherited_until = 0.0

    async def run(self) -> None:
        """Runs until cancelled."""
        subscriptions = [
            await self._bus.subscribe(subjects.health_instance(), self._on_heartbeat),
            await self._bus.subscribe(subjects.node_reported(), self._on_node),
        ]
        undo = (
            self._bus.on_lost(self._on_lost),
            self._bus.on_restored(self._on_restored),
        )
        out_of_service = self._out_of_service.watch(lambda _: None, self._on_put_back)
        self._view.on_change(self._on_record)
        try:
            for record in tuple(self._view.records.values()):
                self._on_record(RecordChanged(record.instance_id, record))
            self._inherited = set(await self._board.read())
            self._inherited_until = self._clock() + self.judge.policy.clear_s
            await self._tick_often()
        finally:
            for each in undo:
                each()
            await out_of_service.close()
            for subscription in subscriptions:
                await subscription.unsubscribe()

    def tell(
        self, teller: str, record: InstanceRecord, signals: Iterable[Signal], ttl_s: float
    ) -> None:
        """Pass on signals from another part of this process, such as the canary probes.

        `teller` names the part. The signals are valid for `ttl_s` seconds.
        """
        self._feed(
            SignalsHeard(teller, record.instance_id, record.incarnation, tuple(signals), ttl_s)
        )

    def is_idle(self, record: InstanceRecord) -> bool:
        """Whether the instance was idle at its last heartbeat."""
        return self._outliers.is_idle(record.instance_id, record.incarnation)

    def counts(self) -> Iterable[tuple[float, dict[str, str]]]:
        """The numbers of faulty instances, by level and by what holds the action back."""
        current = self.judge.current()
        keys = {(int(j.level), j.held_back) for j in current}
        for level, held_back in sorted(keys):
            num = sum((int(j.level), j.held_back) == (level, held_back) for j in current)
            yield float(num), {"level": str(level), "held_back": held_back}

    def page(self) -> object:
        """The content of the page `/status/faults`."""
        reports = map(self._report, self.judge.current())
        return [json_format.MessageToDict(report) for report in reports]

    # -- input ------------------------------------------------------------------------------------

    def _on_record(self, change: RecordChanged) -> None:
        record = change.record
        if record is None:
            self._outliers.forget(change.instance_id)
            self._feed(InstanceGone(change.instance_id, change.is_lease_end))
            self._forget(change.instance_id)
        elif record.role in _JUDGED_ROLES:
            if self._reported.get(record.instance_id, record.incarnation) != record.incarnation:
                self._forget(record.instance_id)  # the report is about the earlier incarnation
            role = Role.Name(record.role)
            self._feed(
                InstanceSeen(
                    record.instance_id, record.incarnation, record.group_id, role, record.node_id
                )
            )

    def _on_put_back(self, instance_id: str) -> None:
        """Forget an instance's restarts, because an operator has put it back into service.

        Otherwise the same restarts would lead to another ejection.
        """
        self._feed(Healed(instance_id))

    async def _on_heartbeat(self, message: Message) -> None:
        try:
            event = decode_event(message, InstanceHealth)
        except InvalidRequest:
            return  # `HealthMonitor` logs this event
        instance_id, incarnation = event.header.publisher_id, event.header.incarnation
        if not event.HasField("vitals"):
            return
        record = self._view.records.get(instance_id)
        if record is None or record.incarnation != incarnation:
            return
        own = tuple(map(signal_from, event.signals))
        self._hear(instance_id, instance_id, incarnation, own, self._lease_s)
        peers = f"{record.group_id}/{Role.Name(record.role)}"
        now = self._clock()
        self._outliers.heard(instance_id, incarnation, peers, vitals_from(event.vitals), now)
        counted = self._outliers.signals(instance_id, now)
        self._hear(_VITALS, instance_id, incarnation, counted, self._lease_s)

    async def _on_node(self, message: Message) -> None:
        try:
            event = decode_event(message, NodeReported)
        except InvalidRequest as exc:
            log.warning("faults.bad_event", error=exc.message)
            return
        ttl_s = VOID_AFTER_PERIODS * event.period_s
        for said in event.instances:
            signals = tuple(map(signal_from, said.signals))
            teller = f"node/{event.node_id}"
            self._hear(teller, said.instance_id, said.instance_incarnation, signals, ttl_s)

    def _hear(
        self,
        teller: str,
        instance_id: str,
        incarnation: int,
        signals: tuple[Signal, ...],
        ttl_s: float,
    ) -> None:
        self._feed(SignalsHeard(teller, instance_id, incarnation, signals, ttl_s))

    def _on_lost(self) -> None:
        self._feed(SignalsLost())

    def _on_restored(self) -> None:
        self._feed(SignalsRestored())
        for judged in self.judge.current():  # the board may have been wiped
            self._unwritten[judged.instance_id] = self._report(judged)

    # -- output -----------------------------------------------------------------------------------

    async def _tick_often(self) -> None:
        while True:
            for judged in self._feed(Tick()):
                await self._announce(judged)
            self._forget_inherited()
            await self._write_board()
            await asyncio.sleep(self._lease_s / _TICKS_PER_LEASE)

    def _forget(self, instance_id: str) -> None:
        if self._reported.pop(instance_id, None) is not None:
            self._unwritten[instance_id] = None

    def _forget_inherited(self) -> None:
        if self._inherited and self._clock() >= self._inherited_until:
            still = {judged.instance_id for judged in self.judge.current()}
            self._unwritten |= dict.fromkeys(self._inherited - still)
            self._inherited.clear()

    def _feed(self, event: Event) -> list[Judged]:
        return self.judge.handle(event, self._clock())

    async def _announce(self, judged: Judged) -> None:
        report = self._report(judged)
        is_bad = judged.level >= EJECTS_FROM
        (log.warning if is_bad else log.info)(
            "instance.fault",
            instance_id=judged.instance_id,
            level=int(judged.level),
            action=judged.action.value,
            reasons=[s.reason for s in judged.signals],
            held_back=judged.held_back,
        )
        if judged.level is Level.WELL:
            self._forget(judged.instance_id)
        else:
            self._unwritten[judged.instance_id] = report
            self._reported[judged.instance_id] = judged.incarnation
        await self._publisher.publish(subjects.fault_report(judged.instance_id), report)

    def _report(self, judged: Judged) -> FaultReport:
        since = Timestamp()
        since.FromNanoseconds(int((judged.since + self._wall_offset_s) * 1e9))
        return FaultReport(
            instance_id=judged.instance_id,
            instance_incarnation=judged.incarnation,
            level=int(judged.level),
            action=judged.action.value,
            signals=map(signal_to, judged.signals),
            since=since,
            node_id=judged.node_id,
            held_back=judged.held_back,
        )

    async def _write_board(self) -> None:
        for instance_id in list(self._unwritten):
            report = self._unwritten.pop(instance_id)
            try:
                if report is None:
                    await self._board.forget(instance_id)
                else:
                    await self._board.write(instance_id, report)
            except Unavailable as exc:
                self._unwritten.setdefault(instance_id, report)
                log.debug("faults.board_unavailable", error=exc.message)
                return


def observe(watch: FaultWatch) -> None:
    metrics.gauge(
        names.HEALTH_FAULTS,
        "Instances with a fault, by level and by what holds the action back",
        watch.counts,
    )
