"""Carries out plans of moves while this master leads (S21, S28, S29).

A plan is a list of moves for one scenario, a kind of requests with its own groups. In a move, one
instance joins or leaves a group or changes its role, or a whole group is lent. Plans come from
schedules, operators, and the controller of the ratio of prefills to decodes. Each scenario makes
one move at a time. To begin a move, the loop writes an adjustment to the desired state. The move
has ended when the groups match the adjusted desired state.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import structlog

from pdmesh.core.groups import adjustments
from pdmesh.core.groups.adjustments import CannotMove
from pdmesh.core.groups.controller import GroupState
from pdmesh.core.groups.desired import Desired, Scenario, ScheduleLine
from pdmesh.core.model import Role
from pdmesh.core.moves.move import (
    Groups,
    GroupShape,
    MoveKind,
    MovePlan,
    Trigger,
    applied,
    serving,
    serving_by_scenario,
)
from pdmesh.core.moves.move_progress import TouchedGroup, progress_of
from pdmesh.core.moves.move_refusal import refusal
from pdmesh.core.moves.next_move import (
    Event,
    GroupsSeen,
    MoveEnded,
    MoveMade,
    MoveNotBegun,
    PlanAsked,
    PlanEnded,
    PlanResumed,
    PlanRunner,
    StartMove,
    resumable,
)
from pdmesh.core.moves.schedule import Schedule
from pdmesh.core.ratio.controller import (
    AskMoves,
    OperatorAsked,
    RatioController,
    RatioDecided,
    RatioLimits,
    ScenarioProfiled,
    WindowSeen,
)
from pdmesh.core.ratio.disturbed_windows import DisturbedWindows
from pdmesh.core.ratio.role_loads import RoleLoads
from pdmesh.core.ratio.scenario_windows import ScenarioWindows
from pdmesh.core.ratio.throughput import Profile
from pdmesh.errors import NotLeader, Unavailable, VersionConflict
from pdmesh.services.master_scheduler.groups.desired_convert import (
    adjustments_to,
    entries_from,
    pending_from,
)
from pdmesh.services.master_scheduler.groups.reconciler import GroupReconciler
from pdmesh.services.master_scheduler.plans.ratio_convert import (
    decision_to,
    move_text,
    shape_fields,
)
from pdmesh.v1 import admin_service_pb2 as pb

log = structlog.get_logger(__name__)

_TICK_S: Final = 1.0
_NUM_SHOWN: Final = 50  # how many decisions operators see
WINDOW_S: Final = 30.0  # default for the time over which requests are measured for the ratio


class MoveLoop:
    """Runs the plans.

    `leadership` returns whether this process leads now, and its epoch. `wall` is unix time.
    """

    def __init__(
        self,
        groups: GroupReconciler,
        windows: ScenarioWindows,
        leadership: Callable[[], tuple[bool, int]],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        window_s: float = WINDOW_S,
    ) -> None:
        self._window_s = window_s
        self._groups = groups
        self._windows, self._closed_at = windows, clock()
        self._ratio, self._loads = RatioController(_limits(window_s)), RoleLoads()
        self._leadership, self._clock, self._wall = leadership, clock, wall
        self._epoch = 0
        self._runner = PlanRunner()
        self._schedule = Schedule(())
        self._lines: tuple[ScheduleLine, ...] | None = None  # the lines of `_schedule`
        self._disturbed = DisturbedWindows()
        self._states: Groups = {}  # the groups with prefills and decodes, as of the last round
        self.decisions: deque[pb.RatioDecision] = deque(maxlen=_NUM_SHOWN)  # since this epoch began

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            try:
                await self.round()
            except (Unavailable, NotLeader, VersionConflict) as exc:
                log.info("plans.unavailable", error=exc.message)
            except Exception:  # a bug here must not end the planning of requests
                log.exception("plans.bug")
            await asyncio.sleep(_TICK_S)

    async def round(self) -> None:
        is_leader, epoch = self._leadership()
        current = self._groups.current
        if not is_leader or current is None or self._groups.observed is None:
            return
        if self._groups.observed.epoch != epoch:
            return  # the reconciler has had no round in this epoch yet
        # Adjustments that are not valid are left out here, and `_make` removes them from the store.
        desired, known = current[0], adjustments.valid(*current)
        is_new = epoch != self._epoch
        if is_new:  # ratio plans of earlier leaders are not stored, so measure from the beginning
            self._epoch = epoch
            self._runner = PlanRunner(gather_s=self._groups.controller.clock.limits.gather_s)
            self._ratio, self._loads = RatioController(_limits(self._window_s)), RoleLoads()
            self._closed_at = self._clock()
            self._windows.serve(())
            self._schedule, self._lines = Schedule((), fired=dict(self._groups.view.fired)), None
            self.decisions.clear()
        self._loads.sample(list(self._groups.view.fleet.instances.values()), self._clock())
        loads = self._loads
        blanks = self._groups.blanks()
        shapes = adjustments.group_shapes(desired, known, lambda g, role: loads.busy([g], role))
        states = {
            i: self._in_its_place(shape, desired.groups[i].racks) for i, shape in shapes.items()
        }
        self._states = {i: shape for i, shape in states.items() if shape.has_ratio}
        if is_new:
            self._resume(states)
        self._ask(desired, states)
        self._steer(desired, self._states, blanks.total())
        self._notice_ends(known, desired)
        seen = GroupsSeen(states, blanks.total(), self._being_upgraded(is_out=True))
        await self._make(self._feed(seen), desired, known)

    def ask(self, plan: MovePlan, epoch: int) -> list[pb.RatioDecision]:
        """Accept an operator's plan. Returns the resulting decisions.

        If a move is invalid, no move begins. Raises CannotMove with the reason.
        """
        groups = self._own(plan.scenario, epoch)
        for move in plan.moves:
            num_blank = self._groups.blanks().total()
            why = refusal(
                move, groups, self._runner.max_busy, is_forced=plan.is_forced, num_blank=num_blank
            )
            if why is not None:
                raise CannotMove(why)
            for group_id in filter(None, (move.group_id, move.to_group)):
                if groups[group_id].scenario != plan.scenario:
                    raise CannotMove(f"group {group_id} belongs to another scenario")
            groups = applied(groups, move)
        return self._decide(self._ratio.handle(OperatorAsked(plan), self._clock()))

    def profiled(self, scenario: str, profile: Profile, epoch: int) -> list[pb.RatioDecision]:
        """Decide the ratio by a measured profile of the scenario's requests.

        Returns the decisions. Raises CannotMove.
        """
        groups = self._own(scenario, epoch)
        return self._decide(
            self._ratio.handle(ScenarioProfiled(scenario, profile, groups), self._clock())
        )

    def _own(self, scenario: str, epoch: int) -> Groups:
        """The groups with prefills and decodes, of all scenarios.

        Raises CannotMove if no group serves `scenario`, or if this leader cannot act now.
        """
        if self._groups.current is None or epoch != self._epoch:
            raise CannotMove(self._groups.paused or "this master has not examined the groups yet")
        if not serving(self._states, scenario):
            raise CannotMove(f"no group of prefills and decodes serves scenario {scenario}")
        return self._states

    def busy(self, group_id: str, role: Role) -> float | None:
        """The recently used share of the slots of this role in the group. None if it is unknown."""
        return self._loads.busy([group_id], role)

    def planning(self) -> frozenset[str]:
        """The scenarios that have a plan, running or waiting."""
        current = self._groups.current
        scenarios = {g.scenario for g in current[0].groups.values()} if current else set()
        return frozenset(s for s in scenarios if self._runner.is_busy(s))

    def gathering(self) -> frozenset[str]:
        """The scenarios of `planning` whose plan still waits for instances to become available."""
        return self._runner.gathering

    def _being_upgraded(self, *, is_out: bool) -> frozenset[str]:
        """The scenarios with a group that gets another revision now.

        If `is_out` is true, a scenario is included only if this group does not fully serve.
        """
        return frozenset(
            scenario
            for scenario, upgrade in self._groups.view.upgrades.items()
            if upgrade.current and not (is_out and self._is_serving(upgrade.current))
        )

    def _in_its_place(self, group: GroupShape, racks: tuple[str, ...]) -> GroupShape:
        """Set the shape's region, and the number of members that could join the group."""
        region, blanks = (
            self._groups.controller.regions.get(group.group_id),
            self._groups.blanks(racks),
        )
        num_blank = blanks.total() if region is None else blanks[region]
        return replace(group, region=region, num_blank=num_blank // self._ranks_of(group.group_id))

    def _ranks_of(self, group_id: str) -> int:
        """The number of instances that form one new prefill or decode of the group.

        It is more than 1 with data parallelism. If prefills and decodes differ, it is the larger
        number.
        """
        observed = self._groups.observed
        wanted = observed.wanted.groups.get(group_id) if observed is not None else None
        return max(map(wanted.dp_size, (Role.PREFILL, Role.DECODE))) if wanted is not None else 1

    def _resume(self, states: Groups) -> None:
        """Resume an earlier leader's plans from schedules, because a schedule fires only once."""
        for left in pending_from(self._groups.view.desired.adjustments):
            age_s = self._wall() - left.plan.asked_at
            plan = resumable(left, age_s)
            log.info("plan.resumed", scenario=plan.scenario, num_moves=len(plan.moves), age_s=age_s)
            self._feed(PlanResumed(left, states, age_s))

    def _ask(self, desired: Desired, states: Groups) -> None:
        if desired.schedules is not self._lines:
            self._lines = desired.schedules
            self._schedule.replace_entries(entries_from(self._lines))
        for due in self._schedule.tick(self._runner.expected(states), self._wall()):
            log.info("plan.due", schedule=due.entry.name, late_s=due.late_s, reason=due.reason)
            if due.plan is not None:
                self._feed(PlanAsked(due.plan))

    def _steer(self, desired: Desired, states: Groups, num_blank: int) -> None:
        """Once per window, adjust the ratio of each scenario that has an automatic ratio."""
        scenarios = dict(sorted(serving_by_scenario(states).items()))
        self._windows.serve(scenarios)
        self._ratio.keep_only(scenarios)
        self._disturbed.see(
            {s: [self._is_serving(g.group_id) for g in own] for s, own in scenarios.items()},
            self.planning(),
            self._being_upgraded(is_out=False),
        )
        window_s = self._clock() - self._closed_at
        if window_s < self._window_s:
            return
        self._closed_at = self._clock()
        self._loads.close()
        disturbed = self._disturbed.close()
        for scenario, own in scenarios.items():
            ids = [g.group_id for g in own]
            window = self._windows.close(
                scenario,
                self._loads.busy(ids, Role.PREFILL),
                self._loads.busy(ids, Role.DECODE),
                window_s,
            )
            if scenario in disturbed:
                window = None
            if desired.scenarios.get(scenario, Scenario()).has_auto_ratio:
                rate = window.num_requests / window_s if window else 0.0
                seen = WindowSeen(scenario, window, states, num_blank, rate)
                self._decide(self._ratio.handle(seen, self._clock()))

    def _is_serving(self, group_id: str) -> bool:
        report = self._groups.controller.reports.get(group_id)
        return report is not None and report.state is GroupState.SERVING

    def _decide(self, effects: Sequence[AskMoves | RatioDecided]) -> list[pb.RatioDecision]:
        told: list[pb.RatioDecision] = []
        for effect in effects:
            match effect:
                case AskMoves(plan):
                    self._feed(PlanAsked(plan))
                case RatioDecided(scenario, action, reason, window, groups, moves):
                    told.append(decision_to(effect, self._wall()))
                    self.decisions.append(told[-1])
                    log.info(
                        "ratio.decided",
                        scenario=scenario,
                        action=action.value,
                        reason=reason,
                        e2e_s=window.e2e_s if window else None,
                        prefill_share=window.prefill_share if window else None,
                        groups=[shape_fields(group) for group in groups],
                        moves=[move_text(move) for move in moves],
                    )
        return told

    def _notice_ends(self, known: adjustments.Adjustments, desired: Desired) -> None:
        shall_be = adjustments.adjusted(desired, known)
        for scenario, move in self._runner.moving.items():
            touched = [move.group_id, *([move.to_group] if move.role and move.to_group else [])]
            self._feed(progress_of(scenario, [self._touched(g, shall_be) for g in touched]))

    def _touched(self, group_id: str, shall_be: Desired) -> TouchedGroup:
        observed = self._groups.observed
        assert observed is not None
        wanted, group = observed.wanted.groups.get(group_id), shall_be.groups.get(group_id)
        counts = (
            (group.prefill, group.decode) if group is not None else None,
            (wanted.counts[Role.PREFILL], wanted.counts[Role.DECODE]) if wanted else None,
        )
        if (report := self._groups.controller.reports.get(group_id)) is None:
            return TouchedGroup(*counts)
        return TouchedGroup(
            *counts,
            is_reported=True,
            is_serving=report.state is GroupState.SERVING,
            is_failed=report.state is GroupState.FAILED,
            detail=report.detail,
            lacks=report.lacks,
        )

    async def _make(
        self, starts: Sequence[StartMove], desired: Desired, known: adjustments.Adjustments
    ) -> None:
        """Begin all moves with one write. If the write fails, the next round tries again."""
        begun: list[StartMove] = []
        for start in starts:
            try:
                known = adjustments.after(start.move, desired, known)
                begun.append(start)
            except CannotMove as exc:
                self._feed(MoveEnded(start.plan.scenario, is_done=False, detail=str(exc)))
        try:
            await self._write(known)
        except (Unavailable, NotLeader, VersionConflict):
            for start in begun:
                self._feed(MoveNotBegun(start.plan.scenario))
            raise
        for start in begun:
            move = start.move
            log.info(
                "plan.move",
                scenario=start.plan.scenario,
                group_id=move.group_id,
                kind=move.kind.value,
                role=move.role.value if move.role else "",
                reason=move.reason,
            )

    def _feed(self, event: Event) -> list[StartMove]:
        """Pass an event to the plan runner. Returns the moves to begin, and logs ended plans."""
        starts: list[StartMove] = []
        for effect in self._runner.handle(event, self._clock()):
            match effect:
                case StartMove():
                    starts.append(effect)
                case MoveMade(plan, move, took_s):
                    log.info(
                        "plan.moved", scenario=plan.scenario, move=move_text(move), took_s=took_s
                    )
                    if move.kind is MoveKind.RECLAIM:
                        self._schedule.set_up_took(plan.scenario, took_s)
                case PlanEnded(plan, outcome, num_moves, detail):
                    self._decide(self._ratio.handle(effect, self._clock()))
                    log.info(
                        "plan.ended",
                        scenario=plan.scenario,
                        trigger=plan.trigger.value,
                        reason=plan.reason,
                        outcome=outcome.value,
                        num_moves=num_moves,
                        detail=detail,
                    )
        return starts

    async def _write(self, known: adjustments.Adjustments) -> None:
        """Write the adjustments, the fired schedules, and the schedules' plans that have not ended.

        So the next leader repeats no schedule, and finishes these plans.
        """
        left = self._runner.outstanding()
        pending = [each for each in left if each.plan.trigger is Trigger.SCHEDULE]
        book = self._groups.view.desired
        stored = book.adjustments
        message = adjustments_to(known, self._schedule.fired, pending, stored.epoch)
        if message == stored:
            return
        message.epoch = self._epoch
        # `stored` is still current, because nothing was awaited since it was read.
        await book.adjust(message)


def _limits(window_s: float) -> RatioLimits:
    """The limits of the ratio controller, with waiting times that are multiples of the window."""
    return RatioLimits(settle_s=window_s, hold_s=10 * window_s, max_hold_s=120 * window_s)
