"""Decides which planned move is made next: one at a time per scenario (S21, S28).

A scenario is a kind of requests with its own groups of instances. Profiling, operators, the monitor
and schedules ask for plans, each a list of moves of instances between groups. Because a scenario's
moves are made one at a time, its plans never overlap. A move is checked when its turn comes,
against the groups as they are then. A plan ends at its first move that is refused or fails. Its
earlier moves stay in effect, and its end is reported.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from pdmesh.core.flight_recorder import FlightRecorder, recorded
from pdmesh.core.moves.move import Groups, Move, MoveKind, MovePlan, applied
from pdmesh.core.moves.move_refusal import MAX_BUSY, refusal

MAX_PLANS: Final = 16  # the most waiting plans per scenario
# A new leader continues an earlier leader's plan only if the plan is younger than this. An older
# plan might, for example, lend groups shortly before they are needed again.
RESUME_WITHIN_S: Final = 3600.0


class MoveOutcome(enum.StrEnum):
    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class PlanAsked:
    plan: MovePlan


@dataclass(frozen=True, slots=True)
class PendingPlan:
    """The moves of a plan that are not made yet. `is_moving` means that the first one is
    under way.
    """

    plan: MovePlan
    is_moving: bool


def resumable(left: PendingPlan, age_s: float) -> MovePlan:
    """The part of an earlier leader's plan that this leader still makes.

    If the plan is old, this is only the move that is under way.
    """
    if age_s <= RESUME_WITHIN_S:
        return left.plan
    return replace(left.plan, moves=left.plan.moves[: left.is_moving])


@dataclass(frozen=True, slots=True)
class PlanResumed:
    """An earlier leader left this plan. `groups` has the present groups.

    `age_s` is the time since the plan was asked for. If the plan is too old, only a move under way
    is finished.
    """

    left: PendingPlan
    groups: Groups
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MoveNotBegun:
    """The start of the move could not be written, so the move must be started again."""

    scenario: str


@dataclass(frozen=True, slots=True)
class MoveEnded:
    """The move is done or, if `is_done` is false, has failed. `detail` says why it failed."""

    scenario: str
    is_done: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class MoveSeen:
    """The move is still under way.

    `lacks` has the missing instances that the move waits for, as text. It is empty if none is
    missing.
    """

    scenario: str
    lacks: str = ""


@dataclass(frozen=True, slots=True)
class GroupsSeen:
    """All groups that serve or are lent now. `num_blank` instances could be given a role.

    No move begins in the scenarios `held`, because an upgrade has already taken one of their groups
    out of service.
    """

    groups: Groups
    num_blank: int = 0
    held: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class StartMove:
    plan: MovePlan
    move: Move


@dataclass(frozen=True, slots=True)
class MoveMade:
    """The move is done, `took_s` seconds after it began."""

    plan: MovePlan
    move: Move
    took_s: float


@dataclass(frozen=True, slots=True)
class PlanEnded:
    """The plan has ended. `num_moves` of its moves were made."""

    plan: MovePlan
    outcome: MoveOutcome
    num_moves: int
    detail: str = ""


Event = PlanAsked | PlanResumed | MoveNotBegun | MoveSeen | MoveEnded | GroupsSeen
Effect = StartMove | MoveMade | PlanEnded


@dataclass(slots=True)
class _Running:
    plan: MovePlan
    num_done: int = 0
    started_at: float | None = None  # when the move under way began; None: none is under way
    gathers_since: float | None = None  # since when this move has waited for instances
    touched: frozenset[str] = frozenset()  # the scenarios that this move changes


@dataclass(slots=True)
class PlanRunner:
    """The running plan and the waiting plans of each scenario.

    A move that waits for instances ends after `gather_s`. Instances that come later still join its
    groups. The group controller ends all other moves itself. `move_timeout_s` ends a move if the
    controller's message about its end was lost.
    """

    max_busy: float = MAX_BUSY
    gather_s: float = 60.0
    move_timeout_s: float = 3600.0
    _running: dict[str, _Running] = field(default_factory=dict)
    _waiting: dict[str, deque[MovePlan]] = field(default_factory=dict)
    recorder: FlightRecorder = field(default_factory=FlightRecorder, repr=False, compare=False)

    def is_busy(self, scenario: str) -> bool:
        return scenario in self._running or bool(self._waiting.get(scenario))

    @property
    def gathering(self) -> frozenset[str]:
        """The scenarios whose move waits for instances. Such a move touches no serving instance."""
        return frozenset(s for s, r in self._running.items() if r.gathers_since is not None)

    @property
    def moving(self) -> Mapping[str, Move]:
        """The move under way in each scenario that has one."""
        return {
            scenario: running.plan.moves[running.num_done]
            for scenario, running in sorted(self._running.items())
            if running.started_at is not None
        }

    def outstanding(self) -> list[PendingPlan]:
        """The plans for the next leader. In each scenario, the plan under way comes before those
        that wait.
        """
        left: list[PendingPlan] = []
        for scenario in sorted(self._running.keys() | self._waiting.keys()):
            if (running := self._running.get(scenario)) is not None:
                rest = replace(running.plan, moves=running.plan.moves[running.num_done :])
                left.append(PendingPlan(rest, running.started_at is not None))
            left += [PendingPlan(plan, False) for plan in self._waiting.get(scenario, ())]
        return left

    def expected(self, groups: Groups) -> Groups:
        """The groups as they will be after all plans. A new plan should start from these."""
        plans = [r.plan.moves[r.num_done :] for _, r in sorted(self._running.items())]
        plans += [plan.moves for _, waiting in sorted(self._waiting.items()) for plan in waiting]
        for move in (move for moves in plans for move in moves):
            is_within = move.kind is not MoveKind.MOVE or move.to_group in groups
            if move.group_id in groups and is_within:
                groups = applied(groups, move)
        return groups

    @recorded
    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case PlanAsked():
                return self._on_asked(event.plan)
            case PlanResumed():
                return self._on_resumed(event, now)
            case MoveNotBegun(scenario):
                return self._on_not_begun(scenario)
            case MoveSeen():
                return self._on_move_seen(event, now)
            case MoveEnded():
                return self._on_ended(event, now)
            case GroupsSeen():
                return self._on_seen(event, now)

    def check_invariants(self) -> None:
        for scenario, running in self._running.items():
            assert running.plan.scenario == scenario
            assert running.num_done < len(running.plan.moves)
        touched = [s for r in self._running.values() if r.started_at is not None for s in r.touched]
        assert len(touched) == len(set(touched))
        assert all(len(plans) <= MAX_PLANS for plans in self._waiting.values())

    def _on_asked(self, plan: MovePlan) -> list[Effect]:
        if not plan.moves:
            return [PlanEnded(plan, MoveOutcome.DONE, 0, "nothing to do")]
        waiting = self._waiting.setdefault(plan.scenario, deque())
        if len(waiting) >= MAX_PLANS:
            return [PlanEnded(plan, MoveOutcome.REFUSED, 0, f"{MAX_PLANS} plans already wait")]
        waiting.append(plan)
        return []

    def _on_resumed(self, event: PlanResumed, now: float) -> list[Effect]:
        left, plan = event.left, resumable(event.left, event.age_s)
        if not left.is_moving or plan.scenario in self._running:
            return self._on_asked(plan)
        touched = frozenset({plan.scenario, *_scenarios(plan.moves[0], event.groups)})
        self._running[plan.scenario] = _Running(plan, 0, now, touched=touched)
        return []

    def _on_not_begun(self, scenario: str) -> list[Effect]:
        if (running := self._running.get(scenario)) is not None:
            running.started_at = running.gathers_since = None
        return []

    def _on_move_seen(self, event: MoveSeen, now: float) -> list[Effect]:
        running = self._running.get(event.scenario)
        if running is None or running.started_at is None:
            return []
        if not event.lacks:
            running.gathers_since = None
        elif running.gathers_since is None:
            running.gathers_since = now
        elif now - running.gathers_since >= self.gather_s:
            return self._end(running, MoveOutcome.FAILED, event.lacks)
        return []

    def _on_ended(self, event: MoveEnded, now: float) -> list[Effect]:
        running = self._running.get(event.scenario)
        if running is None or running.started_at is None:
            return []
        if not event.is_done:
            return self._end(running, MoveOutcome.FAILED, event.detail)
        move = running.plan.moves[running.num_done]
        made = MoveMade(running.plan, move, now - running.started_at)
        running.started_at = running.gathers_since = None
        running.num_done += 1
        if running.num_done == len(running.plan.moves):
            return [made, *self._end(running, MoveOutcome.DONE, event.detail)]
        return [made]

    def _on_seen(self, seen: GroupsSeen, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for scenario in sorted(self._running.keys() | self._waiting.keys()):
            running = self._running.get(scenario) or self._next(scenario)
            if running is None:
                continue
            if running.started_at is None:
                effects += self._start(running, seen, now)
            elif now - running.started_at > self.move_timeout_s:
                effects += self._end(running, MoveOutcome.FAILED, "the move made no progress")
        return effects

    def _next(self, scenario: str) -> _Running | None:
        waiting = self._waiting.get(scenario)
        if not waiting:
            self._waiting.pop(scenario, None)
            return None
        running = self._running[scenario] = _Running(waiting.popleft())
        return running

    def _start(self, running: _Running, seen: GroupsSeen, now: float) -> list[Effect]:
        plan = running.plan
        move = plan.moves[running.num_done]
        touched = frozenset({plan.scenario, *_scenarios(move, seen.groups)})
        if touched & seen.held:
            return []
        if any(touched & r.touched for r in self._running.values() if r.started_at is not None):
            return []  # this move waits until the other scenario's move has ended
        why_not = refusal(
            move, seen.groups, self.max_busy, is_forced=plan.is_forced, num_blank=seen.num_blank
        )
        if why_not is not None:
            return self._end(running, MoveOutcome.REFUSED, why_not)
        running.started_at, running.touched = now, touched
        return [StartMove(plan, move)]

    def _end(self, running: _Running, outcome: MoveOutcome, detail: str) -> list[Effect]:
        del self._running[running.plan.scenario]
        return [PlanEnded(running.plan, outcome, running.num_done, detail)]


def _scenarios(move: Move, groups: Groups) -> list[str]:
    found = (groups.get(move.group_id), groups.get(move.to_group or ""))
    return [group.scenario for group in found if group is not None]
