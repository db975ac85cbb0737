"""Runs the group controller while this master leads.

Input is the registry; output is assignments, ejections and step events. A round decides from one
look at the registry and writes at once. A write that fails ends the round; the next round looks
again. Without a current view and a readable desired state nothing is decided: a wrong guess drains
a fleet.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog

from pdmesh.core.groups.adjustments import Adjustments, adjusted, num_lent
from pdmesh.core.groups.controller import (
    Effect,
    ForgetAssignment,
    GiveAssignment,
    GroupController,
)
from pdmesh.core.groups.desired import Desired
from pdmesh.core.groups.facts import (
    Observed,
    Seen,
    WantedGroups,
    wanted_of,
)
from pdmesh.core.groups.revisions import NO_UPGRADES, Upgrades
from pdmesh.core.groups.round import Round
from pdmesh.core.groups.steps import AnnounceStep
from pdmesh.core.model import Assignment
from pdmesh.core.placement.fleet import Fleet, OutOfServiceSeen
from pdmesh.errors import InvalidRequest, NotLeader, Unavailable, VersionConflict
from pdmesh.events.v1.events_pb2 import GroupStep
from pdmesh.instance.incarnation.assignment import assignment_from
from pdmesh.kv.agent import wire
from pdmesh.net import subjects
from pdmesh.net.assignments import AssignmentBook, Assignments, StaleView
from pdmesh.net.events import EventPublisher
from pdmesh.net.nats.desired_store import DesiredStore, DesiredView
from pdmesh.net.registry import RecordChanged, RegistryView
from pdmesh.services.master_scheduler.groups.desired_convert import adjustments_from
from pdmesh.services.master_scheduler.groups.desired_reader import DesiredReader
from pdmesh.services.master_scheduler.groups.group_convert import assignment_to, seen_from
from pdmesh.services.master_scheduler.groups.out_of_service import OutOfServiceBook
from pdmesh.services.master_scheduler.groups.upgrade_convert import upgrades_from
from pdmesh.telemetry import metrics, names
from pdmesh.v1.admin_service_pb2 import (
    LEAVE_MODE_AT_ONCE,
    LEAVE_MODE_DRAIN,
    DesiredVersion,
)
from pdmesh.v1.admin_service_pb2 import Adjustments as AdjustmentsMessage
from pdmesh.v1.admin_service_pb2 import Upgrades as UpgradesMessage

log = structlog.get_logger(__name__)

KV_TRANSPORT: Final = f"ucx/{wire.VERSION}"
_TICK_S: Final = 0.5  # without any change: for what is overdue
_GAP_S: Final = 0.02  # changes that come together make one round


class GroupLoop:
    """`leadership` returns (whether this process leads, its epoch) now."""

    def __init__(
        self,
        fleet: Fleet,
        view: RegistryView,
        assignments: Assignments,
        store: DesiredStore,
        out_of_service: OutOfServiceBook,
        publisher: EventPublisher,
        leadership: Callable[[], tuple[bool, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._view, self._assignments = fleet, view, assignments
        self._store, self._out_of_service, self._publisher = store, out_of_service, publisher
        self._leadership, self._clock = leadership, clock
        self.controller = GroupController()
        self.observed: Observed | None = None  # of the last round
        self._looked: Round | None = None  # at that time
        self.paused = ""  # why the leader decides nothing now
        self.on_step: Callable[[AnnounceStep], None] = lambda step: None
        self._epoch = 0
        self._book: AssignmentBook | None = None
        self._desired: DesiredView | None = None
        self._reader = DesiredReader()
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        self._observe_metrics()
        try:
            await self.open()
            while True:
                await self._until_woken()
                try:
                    await self.round()
                except Exception:  # a bug here must not end the planning of requests
                    log.exception("groups.bug")
                    await asyncio.sleep(_TICK_S)
        finally:
            await self.close()

    async def open(self) -> None:
        """Returns when everything that a round needs is known."""
        self._view.on_change(self._on_record)
        self._desired = self._store.watch(self._wake.set)
        await self._out_of_service.watch(self._on_out_of_service)
        self._book = await self._assignments.book()
        self._book.on_change(self._wake.set)
        await self._desired.until_loaded()

    async def close(self) -> None:
        if self._desired is not None:
            await self._desired.close()
        await self._out_of_service.close()
        if self._book is not None:
            await self._book.close()

    def wake(self) -> None:
        """Our leadership changed."""
        self._wake.set()

    @property
    def desired(self) -> DesiredVersion | None:
        return self._desired.current if self._desired is not None else None

    @property
    def current(self) -> tuple[Desired, Adjustments] | None:
        """What the operator asks for, and with the plans' adjustments; None while this leader
        cannot act.
        """
        if self.paused or self.desired is None or self._desired is None:
            return None
        desired = self._reader.known(self.desired)
        if desired is None:
            return None
        return desired, adjustments_from(self._desired.adjustments)

    @property
    def adjustments(self) -> AdjustmentsMessage:
        return self._desired.adjustments if self._desired is not None else AdjustmentsMessage()

    @property
    def upgrades(self) -> Upgrades:
        """The registry's records of upgrades; also while another master leads."""
        return upgrades_from(self._desired.upgrades) if self._desired is not None else NO_UPGRADES

    @property
    def fired(self) -> Mapping[str, float]:
        """When each schedule fired last, by the registry."""
        return dict(self.adjustments.fired)

    def blanks(self, racks: tuple[str, ...] = ()) -> Counter[str]:
        """Blank instances that may get a role, by region; only of these racks if any are named."""
        if self.observed is None:
            return Counter()
        if self._looked is None or self._looked.observed is not self.observed:
            self._looked = Round(self.observed)
        return self._looked.num_blanks(racks)

    def revision_of(self, key: str) -> int:
        """The revision of `adjustments` or `upgrades` now, to compare a write with
        (`net.nats.desired_store`).
        """
        return self._desired.revisions.get(key, 0) if self._desired is not None else 0

    def take_adjustments(self, adjustments: AdjustmentsMessage, revision: int) -> None:
        """They have just been written: the next decision uses them."""
        assert self._desired is not None
        self._desired.take_adjustments(adjustments, revision)
        self._wake.set()

    def take_upgrades(self, upgrades: UpgradesMessage, revision: int) -> None:
        """They have just been written: the next round applies them."""
        assert self._desired is not None
        self._desired.take_upgrades(upgrades, revision)
        self._wake.set()

    def is_assigned(self, instance_id: str) -> bool:
        """Whether the instance has an assignment, even between two incarnations."""
        return self._book is not None and instance_id in self._book.known

    def _on_record(self, change: RecordChanged) -> None:
        self._wake.set()

    def _on_out_of_service(self) -> None:
        """On every master, not only the leader: any of them may plan the next moment."""
        out = self._out_of_service.left(LEAVE_MODE_AT_ONCE)
        self._fleet.handle(OutOfServiceSeen(out), self._clock())
        self._wake.set()

    async def _until_woken(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TICK_S):
                await self._wake.wait()
                await asyncio.sleep(_GAP_S)
        self._wake.clear()

    async def round(self) -> None:
        """Look, decide and write, if this master leads and its whole view is current."""
        is_leader, epoch = self._leadership()
        if not is_leader:
            self._pause("", "")
            return
        assert self._book is not None
        assert self._desired is not None
        if self._desired.current is not None:
            await self._reader.read(self._desired.current)
        if stale := self._stale(self._book, self._desired):
            self._pause("stale", f"the view of {stale} is not current")
            return
        if epoch != self._epoch:  # times of an earlier leadership have no meaning now
            self._epoch, self.controller = epoch, GroupController()
        try:
            self._check_leadership(epoch)
            await self._store.restore(self._desired)
            await self._out_of_service.restore(epoch)
            if self._desired.current is None:
                self._pause("", "")
            else:
                await self._act(self._desired.current, epoch)
        except (Unavailable, NotLeader, VersionConflict) as exc:
            log.info("groups.unavailable", error=exc.message)

    async def _act(self, version: DesiredVersion, epoch: int) -> None:
        assert self._book is not None
        if not self._reader.has_read(version):
            return  # it has just come: the next round reads it
        desired = self._reader.known(version)
        if desired is None:
            self._pause("unreadable", self._reader.problem)
            return
        self._pause("", "")
        await self._out_of_service.eject_faulty(epoch)
        self.observed = self._look(epoch, version, desired)
        effects = self.controller.handle(self.observed, self._clock())
        await self._carry_out(effects, self._book, epoch)

    def _stale(self, book: AssignmentBook, desired: DesiredView) -> str:
        """The first view that may be older than the registry; empty: none is."""
        are_current = {
            "instances": self._view.is_connected,
            "assignments": book.is_current,
            "desired state": desired.is_current,
            "instances out of service": self._out_of_service.is_current,
        }
        return next(
            (f"the {what}" for what, is_current in are_current.items() if not is_current), ""
        )

    def _pause(self, reason: str, why: str) -> None:
        """Each skipped round is counted, each change of the reason logged."""
        if reason:
            _skipped.add(1, {names.ATTR_REASON: reason})
        if why != self.paused:
            log.warning("groups.paused" if why else "groups.resumed", why=why or self.paused)
        self.paused = why

    def _check_leadership(self, epoch: int) -> None:
        if self._leadership() != (True, epoch):
            raise NotLeader(f"this master leads no more in epoch {epoch}")

    def _look(self, epoch: int, version: DesiredVersion, desired: Desired) -> Observed:
        assert self._book is not None
        assert self._desired is not None
        seen: dict[str, Seen] = {}
        for instance_id, record in self._view.records.items():
            instance = self._fleet.instances.get(instance_id)
            if each := seen_from(record, instance.used_slots() if instance else 0):
                seen[instance_id] = each
        given: dict[str, Assignment] = {}
        for instance_id, message in self._book.known.items():
            try:
                given[instance_id] = assignment_from(message)
            except InvalidRequest as exc:
                log.warning("groups.bad_assignment", instance_id=instance_id, error=exc.message)

        known = adjustments_from(self._desired.adjustments)
        wanted = wanted_now(desired, known, self.upgrades)
        book = self._out_of_service
        to_drain, out_at_once = book.left(LEAVE_MODE_DRAIN), book.left(LEAVE_MODE_AT_ONCE)
        return Observed(epoch, version.version, wanted, seen, given, to_drain, out_at_once)

    async def _carry_out(self, effects: Sequence[Effect], book: AssignmentBook, epoch: int) -> None:
        """Report steps for what was written, and for what was only seen."""
        unwritten = {
            e.instance_id for e in effects if isinstance(e, GiveAssignment | ForgetAssignment)
        }
        try:
            for effect in effects:
                match effect:
                    case GiveAssignment(instance_id, assignment):
                        self._check_leadership(epoch)
                        await book.write(assignment_to(instance_id, assignment))
                        unwritten.discard(instance_id)
                    case ForgetAssignment(instance_id):
                        self._check_leadership(epoch)
                        await book.forget(instance_id, epoch)
                        unwritten.discard(instance_id)
        except (NotLeader, StaleView) as exc:
            log.info("groups.overtaken", error=str(exc))
        finally:
            for effect in effects:
                if isinstance(effect, AnnounceStep) and effect.instance_id not in unwritten:
                    await self._tell(effect, epoch)

    async def _tell(self, step: AnnounceStep, epoch: int) -> None:
        self.on_step(step)
        _steps.add(1, {names.ATTR_STEP: step.step})
        log.info(
            "group.step",
            group_id=step.group_id,
            step=step.step,
            instance_id=step.instance_id,
            role=step.role,
            replaces=step.replaces,
            detail=step.detail,
        )
        await self._publisher.publish(
            subjects.group_step(step.group_id),
            GroupStep(
                group_id=step.group_id,
                step=step.step,
                instance_id=step.instance_id,
                instance_incarnation=step.incarnation,
                assignment_id=step.assignment_id,
                role=step.role,
                replaces=step.replaces,
                detail=step.detail,
                epoch=epoch,
            ),
        )

    def _observe_metrics(self) -> None:
        def counts() -> list[tuple[float, dict[str, str]]]:
            wanted = self.observed.wanted if self.observed is not None else WantedGroups()
            return [
                (group.counts[role], {"group": group_id, "role": role.value})
                for group_id, group in wanted.groups.items()
                for role in group.counts
            ]

        metrics.gauge(
            names.GROUP_WANTED, "Instances that a group shall have, by group and role", counts
        )
        metrics.gauge(
            names.GROUP_STATE,
            "1 for the state that a group is in",
            lambda: [
                (1.0, {"group": group_id, "state": report.state.value})
                for group_id, report in list(self.controller.reports.items())
            ],
        )


def wanted_now(
    desired: Desired, known: Adjustments, upgrades: Upgrades = NO_UPGRADES
) -> WantedGroups:
    """With the plans' adjustments and the groups' revisions.

    Instances of lent groups are kept for their borrowers.
    """
    return wanted_of(adjusted(desired, known), KV_TRANSPORT, num_lent(desired, known), upgrades)


_steps = metrics.counter(names.GROUP_STEPS, "Steps of groups, by kind")
_skipped = metrics.counter(
    names.GROUP_ROUNDS_SKIPPED, "Rounds in which the leader decided nothing, by reason"
)
