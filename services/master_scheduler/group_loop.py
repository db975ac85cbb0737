"""Runs the group controller while this master leads: registry in, assignments, holds and step events out.

A round is decided from one look at the registry and written at once. A write that fails ends the round; the next one looks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog

from pdmesh.core.adjustments import Adjustments, adjusted, num_lent
from pdmesh.core.desired import Desired
from pdmesh.core.fault_levels import RESPONSES, Level
from pdmesh.core.fleet import Fleet, Instance, IsolationSeen
from pdmesh.core.group_controller import Effect, Forget, Give, GroupController
from pdmesh.core.group_facts import Observed, Seen, Wanted, wanted_of
from pdmesh.core.group_round import Round
from pdmesh.core.group_steps import Step
from pdmesh.core.instance_events import Assignment
from pdmesh.desired_file import read
from pdmesh.errors import InvalidRequest, NotLeader, Unavailable
from pdmesh.events.v1.events_pb2 import GroupStep
from pdmesh.instance.assignment import assignment_from
from pdmesh.kv import wire
from pdmesh.net import subjects
from pdmesh.net.assignments import AssignmentBook, Assignments, StaleView
from pdmesh.net.board import Board, BoardView
from pdmesh.net.desired_store import DesiredStore, DesiredView
from pdmesh.net.events import EventPublisher
from pdmesh.net.registry import RecordChanged, RegistryView
from pdmesh.telemetry import metrics, names
from pdmesh.v1.admin_service_pb2 import (
    HOLD_KIND_DRAIN,
    HOLD_KIND_ISOLATE,
    DesiredVersion,
    Hold,
)
from pdmesh.v1.admin_service_pb2 import Adjustments as AdjustmentsMessage
from services.master_scheduler.desired_convert import adjustments_from
from services.master_scheduler.group_convert import assignment_to, seen_from

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
        holds: Board[Hold],
        publisher: EventPublisher,
        leadership: Callable[[], tuple[bool, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._view, self._assignments = fleet, view, assignments
        self._store, self._board, self._publisher = store, holds, publisher
        self._leadership, self._clock = leadership, clock
        self.controller = GroupController()
        self.observed: Observed | None = None  # of the last round
        self._epoch = 0
        self._book: AssignmentBook | None = None
        self._desired: DesiredView | None = None
        self._holds: BoardView[Hold] | None = None
        self._read = _Read()
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        self._view.on_change(self._on_record)
        self._desired = self._store.watch(self._wake.set)
        self._holds = self._board.watch(lambda _: self._on_holds(), lambda _: self._on_holds())
        self._observe_metrics()
        try:
            self._book = await self._assignments.book()
            self._book.on_change(self._wake.set)
            await self._desired.until_loaded()
            await self._holds.loaded.wait()
            while True:
                await self._until_woken()
                try:
                    await self._maybe_round(self._book, self._desired, self._holds)
                except Exception:  # a bug here must not end the planning of requests
                    log.exception("groups.bug")
                    await asyncio.sleep(_TICK_S)
        finally:
            await self._desired.close()
            await self._holds.close()
            if self._book is not None:
                await self._book.close()

    def wake(self) -> None:
        """The own leadership changed."""
        self._wake.set()

    @property
    def desired(self) -> DesiredVersion | None:
        return self._desired.current if self._desired is not None else None

    @property
    def current(self) -> tuple[Desired, Adjustments] | None:
        """What the operator asks for and what plans have made of it; None if nothing was ever applied."""
        if self.desired is None or self._desired is None:
            return None
        return self._read.desired(self.desired), adjustments_from(self._desired.adjustments)

    @property
    def adjustments(self) -> AdjustmentsMessage:
        return self._desired.adjustments if self._desired is not None else AdjustmentsMessage()

    @property
    def fired(self) -> Mapping[str, float]:
        """For which time each schedule fired last, as the registry knows it."""
        return dict(self.adjustments.fired)

    @property
    def num_blank(self) -> int:
        """Instances that may be given a role."""
        return len(Round(self.observed).blanks()) if self.observed is not None else 0

    def take_adjustments(self, adjustments: AdjustmentsMessage) -> None:
        """They were written just now: what is decided next counts with them."""
        assert self._desired is not None
        self._desired.adjustments = adjustments
        self._wake.set()

    @property
    def holds(self) -> Sequence[Hold]:
        known = self._holds.known if self._holds is not None else {}
        return [known[instance_id] for instance_id in sorted(known)]

    def _on_record(self, change: RecordChanged) -> None:
        self._wake.set()

    def _on_holds(self) -> None:
        """Every master knows them, not the leader alone: it may plan the next moment."""
        held = {h.instance_id for h in self.holds if h.kind == HOLD_KIND_ISOLATE}
        self._fleet.handle(IsolationSeen(frozenset(held)), self._clock())
        self._wake.set()

    async def _until_woken(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TICK_S):
                await self._wake.wait()
                await asyncio.sleep(_GAP_S)
        self._wake.clear()

    async def _maybe_round(
        self, book: AssignmentBook, desired: DesiredView, holds: BoardView[Hold]
    ) -> None:
        is_leader, epoch = self._leadership()
        if not is_leader or not (self._view.is_connected and book.is_current):
            return
        if epoch != self._epoch:  # times of an earlier leadership mean nothing now
            self._epoch, self.controller = epoch, GroupController()
        version = desired.current
        if version is None:
            return
        try:
            await self._hold_faulty(holds)
            self.observed = self._look(epoch, version, desired.adjustments, book, holds)
            effects = self.controller.handle(self.observed, self._clock())
            await self._carry_out(effects, book, epoch)
        except Unavailable as exc:
            log.info("groups.unavailable", error=exc.message)

    def _look(
        self,
        epoch: int,
        version: DesiredVersion,
        adjustments: AdjustmentsMessage,
        book: AssignmentBook,
        holds: BoardView[Hold],
    ) -> Observed:
        seen: dict[str, Seen] = {}
        for instance_id, record in self._view.records.items():
            instance = self._fleet.instances.get(instance_id)
            if each := seen_from(record, instance.used_slots() if instance else 0):
                seen[instance_id] = each
        given: dict[str, Assignment] = {}
        for instance_id, message in book.known.items():
            try:
                given[instance_id] = assignment_from(message)
            except InvalidRequest as exc:
                log.warning("groups.bad_assignment", instance_id=instance_id, error=exc.message)

        def held(kind: int) -> frozenset[str]:
            return frozenset(i for i, hold in holds.known.items() if hold.kind == kind)

        known = adjustments_from(adjustments)
        wanted = wanted_now(self._read.desired(version), known)
        return Observed(
            epoch, version.version, wanted, seen, given, held(HOLD_KIND_DRAIN), held(HOLD_KIND_ISOLATE)
        )  # fmt: skip

    async def _carry_out(self, effects: Sequence[Effect], book: AssignmentBook, epoch: int) -> None:
        """Steps are told of what was written, and of what was merely seen."""
        unwritten = {e.instance_id for e in effects if isinstance(e, Give | Forget)}
        try:
            for effect in effects:
                match effect:
                    case Give(instance_id, assignment):
                        await book.write(assignment_to(instance_id, assignment))
                        unwritten.discard(instance_id)
                    case Forget(instance_id):
                        await book.forget(instance_id, epoch)
                        unwritten.discard(instance_id)
        except (NotLeader, StaleView) as exc:
            log.info("groups.overtaken", error=str(exc))
        finally:
            for effect in effects:
                if isinstance(effect, Step) and effect.instance_id not in unwritten:
                    await self._tell(effect, epoch)

    async def _tell(self, step: Step, epoch: int) -> None:
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

    async def _hold_faulty(self, holds: BoardView[Hold]) -> None:
        """An instance that is to be replaced for a fault stays out until somebody heals it: its word is worth nothing."""
        for instance_id, instance in sorted(self._fleet.instances.items()):
            if instance_id in holds.known or not _is_to_be_replaced(instance):
                continue
            assert instance.fault is not None
            finishes = RESPONSES[instance.fault.level].finishes_running
            hold = Hold(
                instance_id=instance_id,
                kind=HOLD_KIND_DRAIN if finishes else HOLD_KIND_ISOLATE,
                reason=f"fault level {instance.fault.level:d}: {', '.join(instance.fault.reasons)}",
            )
            hold.since.GetCurrentTime()
            await self._board.write(instance_id, hold)
            log.warning("group.held", instance_id=instance_id, reason=hold.reason)

    def _observe_metrics(self) -> None:
        def counts() -> list[tuple[float, dict[str, str]]]:
            wanted = self.observed.wanted if self.observed is not None else Wanted()
            return [
                (group.counts[role], {"group": group_id, "role": role.value})
                for group_id, group in wanted.groups.items()
                for role in group.counts
            ]

        metrics.gauge(names.GROUP_WANTED, "Instances that a group shall have, by role", counts)
        metrics.gauge(
            names.GROUP_STATE,
            "1 for the state that a group is in",
            lambda: [
                (1.0, {"group": group_id, "state": report.state.value})
                for group_id, report in list(self.controller.reports.items())
            ],
        )


class _Read:
    """The desired state of the current version, read once."""

    def __init__(self) -> None:
        self._text, self._desired = "", Desired()

    def desired(self, version: DesiredVersion) -> Desired:
        """What was stored was valid once; if a later release refuses it, the last valid one stands."""
        if version.text != self._text:
            self._text = version.text
            try:
                self._desired = read(version.text)
            except InvalidRequest as exc:
                log.error("groups.unreadable", version=version.version, error=exc.message)
        return self._desired


def wanted_now(desired: Desired, known: Adjustments) -> Wanted:
    """With what plans have adjusted; instances of lent groups are kept for their borrowers."""
    return wanted_of(adjusted(desired, known), KV_TRANSPORT, num_lent(desired, known))


def _is_to_be_replaced(instance: Instance) -> bool:
    fault = instance.fault
    return fault is not None and fault.level >= Level.INSTANCE and not fault.held_back


_steps = metrics.counter(names.GROUP_STEPS, "Steps of groups, by kind")
