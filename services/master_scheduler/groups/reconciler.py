"""Brings the groups of instances to the desired state, while this master leads.

Each round reads the view of the cluster, ejects faulty instances, lets the group controller decide,
and writes its assignments at once. It also publishes an event for each step of a group, for example
when a member was lost. If a write fails, the round ends, and the next round reads the view again.
Without a current view, nothing is decided, because a wrong guess could drain all instances. If the
desired state cannot be read, the last readable version stays in force.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from pdmesh.core.groups.adjustments import Adjustments
from pdmesh.core.groups.cluster_state import (
    Observed,
    WantedGroups,
)
from pdmesh.core.groups.controller import (
    Effect,
    ForgetAssignment,
    GiveAssignment,
    GroupController,
)
from pdmesh.core.groups.desired import Desired
from pdmesh.core.groups.round import Round
from pdmesh.core.groups.step_announcements import AnnounceStep
from pdmesh.errors import NotLeader, Unavailable, VersionConflict
from pdmesh.events.v1.events_pb2 import GroupStep
from pdmesh.net import subjects
from pdmesh.net.assignments import AssignmentBook, StaleView
from pdmesh.net.events import EventPublisher
from pdmesh.services.master_scheduler.groups.cluster_view import ClusterView
from pdmesh.services.master_scheduler.groups.group_convert import assignment_to
from pdmesh.telemetry import metrics, names

log = structlog.get_logger(__name__)

_TICK_S: Final = 0.5  # the longest time between two rounds, to notice expired time limits
_GAP_S: Final = 0.02  # the wait after a change, so that one round handles several changes


class GroupReconciler:
    """Runs the rounds. `leadership` returns whether this process leads now, and its epoch."""

    def __init__(
        self,
        view: ClusterView,
        publisher: EventPublisher,
        leadership: Callable[[], tuple[bool, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.view, self._publisher = view, publisher
        self._leadership, self._clock = leadership, clock
        self.controller = GroupController()
        self.observed: Observed | None = None  # the controller's input in the last round
        self._observed_round: Round | None = None  # made from `observed` when it is needed
        self.paused = ""  # why the view is outdated or the file unreadable; else empty
        self.on_step: Callable[[AnnounceStep], None] = lambda step: None
        self._epoch = 0

    async def run(self) -> None:
        """Runs until cancelled."""
        self._observe_metrics()
        try:
            await self.view.open()
            while True:
                await self._until_woken()
                try:
                    await self.round()
                except Exception:  # a bug here must not end the planning of requests
                    log.exception("groups.bug")
                    await asyncio.sleep(_TICK_S)
        finally:
            await self.view.close()

    def wake(self) -> None:
        """Begin a round soon. Call this when this process gains or loses the leadership."""
        self.view.changed.set()

    @property
    def current(self) -> tuple[Desired, Adjustments] | None:
        """The same as `ClusterView.current`, but None while `paused` gives a reason."""
        return None if self.paused else self.view.current

    def blanks(self, racks: tuple[str, ...] = ()) -> Counter[str]:
        """The number of blank instances, which have no role yet, by region.

        If `racks` is not empty, only instances in these racks are counted.
        """
        if self.observed is None:
            return Counter()
        if self._observed_round is None or self._observed_round.observed is not self.observed:
            self._observed_round = Round(self.observed)
        return self._observed_round.num_blanks(racks)

    async def _until_woken(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TICK_S):
                await self.view.changed.wait()
                await asyncio.sleep(_GAP_S)
        self.view.changed.clear()

    async def round(self) -> None:
        """Read, decide and write, if this master leads and its whole view is current."""
        is_leader, epoch = self._leadership()
        if not is_leader:
            self._forget()
            return
        await self.view.read()
        if stale := self.view.stale():
            self._pause("stale", f"the view of {stale} is not current")
            return
        if epoch != self._epoch:  # the controller's times from an earlier leadership are too old
            self._epoch, self.controller = epoch, GroupController()
        try:
            self._check_leadership(epoch)
            await self.view.desired.restore()
            await self.view.out_of_service.restore(epoch)
            if self.view.version is None:
                self._pause("", "")
            else:
                await self._reconcile(self.view.version.version, epoch)
        except (Unavailable, NotLeader, VersionConflict) as exc:
            log.info("groups.unavailable", error=exc.message)

    def _forget(self) -> None:
        """Drop the state of the groups, because another master leads now."""
        self._pause("", "")
        self._epoch, self.observed, self.controller = 0, None, GroupController()

    async def _reconcile(self, version: int, epoch: int) -> None:
        problem, current = self.view.why_unreadable(), self.view.current
        if problem is None:
            return  # this version has arrived since `read`, and the next round reads it
        self._pause("unreadable" if problem else "", problem)
        if current is None:
            return
        await self.view.out_of_service.eject_faulty(epoch)
        self.observed = self.view.observe(epoch, version, current[0])
        effects = self.controller.handle(self.observed, self._clock())
        await self._carry_out(effects, self.view.assignments, epoch)

    def _pause(self, reason: str, why: str) -> None:
        """Set `paused` to `why`. Count each round with a reason, and log when `paused` changes."""
        if reason:
            _skipped.add(1, {names.ATTR_REASON: reason})
        if why != self.paused:
            log.warning("groups.paused" if why else "groups.resumed", why=why or self.paused)
        self.paused = why

    def _check_leadership(self, epoch: int) -> None:
        if self._leadership() != (True, epoch):
            raise NotLeader(f"this master no longer leads in epoch {epoch}")

    async def _carry_out(self, effects: Sequence[Effect], book: AssignmentBook, epoch: int) -> None:
        """Write the effects, and publish the steps.

        A step that needs a write is published only if the write succeeded.
        """
        writes = (e for e in effects if isinstance(e, GiveAssignment | ForgetAssignment))
        unwritten = {each.instance_id for each in writes}
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
                if isinstance(effect, AnnounceStep) and unwritten.isdisjoint(
                    _instances_of(effect.instance_id, effects)
                ):
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

        metrics.gauge(names.GROUP_WANTED, "Desired instances, by group and role", counts)
        metrics.gauge(
            names.GROUP_STATE,
            "1 for the current state of a group",
            lambda: [
                (1.0, {"group": group_id, "state": report.state.value})
                for group_id, report in list(self.controller.reports.items())
            ],
        )


def _instances_of(member_id: str, effects: Sequence[Effect]) -> list[str]:
    """The instances that a group member consists of.

    A member is one instance, or a domain (data-parallel group) of several instances. For a domain,
    these are the instances to which `effects` assign its ranks.
    """
    ranks = [
        effect.instance_id
        for effect in effects
        if isinstance(effect, GiveAssignment)
        and (domain := effect.assignment.role_spec.domain) is not None
        and domain.domain_id == member_id
    ]
    return ranks or [member_id]


_steps = metrics.counter(names.GROUP_STEPS, "Steps of groups, by kind")
_skipped = metrics.counter(
    names.GROUP_ROUNDS_SKIPPED, "Rounds in which the leader made no decision, by reason"
)
