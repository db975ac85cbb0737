"""Decides how a scenario's P:D ratio changes (S27-S32).

It observes, finds which role is short, plans one move, judges it, and undoes it if it did harm.
Every step is told as a `Decided` with its inputs. After a move the loop waits until its effect can
be seen, then compares. Less success or slower answers undo the move, and the same finding is left
alone for a while that doubles. The detector then learns anew, so one change of the workload is
answered once.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from pdmesh.core.model import Role
from pdmesh.core.moves.move import (
    Groups,
    GroupShape,
    Move,
    MovePlan,
    Trigger,
    inverse,
    other,
    serving,
)
from pdmesh.core.moves.plan_runner import MoveOutcome, PlanEnded
from pdmesh.core.ratio.detector import (
    BottleneckDetector,
    DetectorLimits,
    Finding,
    Window,
)
from pdmesh.core.ratio.model import Profile
from pdmesh.core.ratio.planner import PlannerLimits, one_step, towards


@dataclass(frozen=True, slots=True)
class RatioLimits:
    """Seconds and shares.

    `settle_s`: from a move's end until windows show none of the time before.
    """

    detector: DetectorLimits = field(default_factory=DetectorLimits)
    planner: PlannerLimits = field(default_factory=PlannerLimits)
    settle_s: float = 30.0
    judge_windows: int = 3
    max_success_drop: float = 0.02
    max_e2e_rise: float = 0.10  # of the mean, unless more is asked for than before
    # If requests spend this share of E2E at the gateway, more come than can be answered.
    waiting: float = 0.25
    max_pace_drop: float = 0.05  # of answers per second, if requests wait
    # For so long a failed move is not tried again and a good one not reversed; doubles each time.
    hold_s: float = 300.0
    max_hold_s: float = 3600.0


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WindowSeen:
    """A window of a scenario ended.

    `window` is None if its numbers are not known. `rate_per_s`: requests that came.
    """

    scenario: str
    window: Window | None
    groups: Groups
    num_blank: int = 0
    rate_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Profiled:
    """It was measured in advance what the scenario's requests take."""

    scenario: str
    profile: Profile
    groups: Groups


@dataclass(frozen=True, slots=True)
class OperatorAsked:
    plan: MovePlan


Event = WindowSeen | Profiled | OperatorAsked | PlanEnded

# --- effects --------------------------------------------------------------------------------------


class RatioAction(enum.StrEnum):
    PLANNED = "planned"
    LEFT_ALONE = "left alone"
    KEPT = "kept"
    UNDONE = "undone"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class AskMoves:
    plan: MovePlan


@dataclass(frozen=True, slots=True)
class Decided:
    """For the log and the page: what was decided about a scenario, why, and from which numbers."""

    scenario: str
    action: RatioAction
    reason: str
    window: Window | None = None
    groups: tuple[GroupShape, ...] = ()
    moves: tuple[Move, ...] = ()


Effect = AskMoves | Decided


@dataclass(frozen=True, slots=True)
class _Before:
    """The state when a move of ours was planned: means of the windows that led to it."""

    e2e_s: float
    queue_s: float
    success_share: float
    answered_per_s: float
    rate_per_s: float
    short_of: Role
    move: Move


@dataclass(slots=True)
class _Busy:
    """A group's load over the last windows. It starts anew when the group's shape changes."""

    shape: tuple[int, int]
    recent: deque[tuple[float | None, float | None]]

    def mean(self, at: int) -> float | None:
        values = [each[at] for each in self.recent]
        known = [busy for busy in values if busy is not None]
        return _mean(known) if len(known) == len(values) else None


@dataclass(slots=True)
class _Scenario:
    detector: BottleneckDetector
    before: _Before | None = None  # while a move of ours is made or judged
    plan: MovePlan | None = None  # ours, until it ends
    judge_from: float = 0.0
    judged: list[Window] = field(default_factory=list)
    held_until: float = -math.inf
    held_role: Role | None = None
    hold_s: float = 0.0
    kept_role: Role | None = None  # what the last good move was for
    busy: dict[str, _Busy] = field(default_factory=dict)  # by group
    said: str = ""  # the last reason to leave it alone, not repeated before `silent_until`
    silent_until: float = -math.inf


@dataclass(slots=True)
class RatioController:
    limits: RatioLimits = field(default_factory=RatioLimits)
    _scenarios: dict[str, _Scenario] = field(default_factory=dict)

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case WindowSeen():
                return self._on_window(event, now)
            case Profiled():
                return self._on_profile(event)
            case OperatorAsked():
                plan = event.plan
                said = Decided(plan.scenario, RatioAction.PLANNED, plan.reason, moves=plan.moves)
                return [said, AskMoves(plan)]
            case PlanEnded():
                return self._on_ended(event, now)

    def keep_only(self, scenarios: Collection[str]) -> None:
        """Forget all scenarios but these, which have groups now."""
        self._scenarios = {s: state for s, state in self._scenarios.items() if s in scenarios}

    def _state(self, scenario: str) -> _Scenario:
        state = self._scenarios.get(scenario)
        if state is None:
            detector = BottleneckDetector(self.limits.detector)
            state = self._scenarios[scenario] = _Scenario(detector, hold_s=self.limits.hold_s)
        return state

    # --- profile and operator ---------------------------------------------------------------------

    def _on_profile(self, event: Profiled) -> list[Effect]:
        own = serving(event.groups, event.scenario)
        numbers = (
            f"b_p/T_p {event.profile.prefill_per_s:.3g}/s, b_d/T_d "
            f"{event.profile.decode_per_s:.3g}/s"
        )
        moves = towards(event.profile, own, numbers)
        if not moves:
            return [Decided(event.scenario, RatioAction.LEFT_ALONE, numbers, groups=tuple(own))]
        plan = MovePlan(event.scenario, Trigger.PROFILE, moves, numbers)
        said = Decided(event.scenario, RatioAction.PLANNED, numbers, groups=tuple(own), moves=moves)
        return [said, AskMoves(plan)]

    def _on_ended(self, event: PlanEnded, now: float) -> list[Effect]:
        state = self._state(event.plan.scenario)
        text = (
            f"{event.plan.trigger.value} plan {event.outcome.value}: {event.num_moves} of "
            f"{len(event.plan.moves)} moves"
        )
        said = Decided(
            event.plan.scenario,
            RatioAction.ENDED,
            f"{text}; {event.detail}" if event.detail else text,
            moves=event.plan.moves,
        )
        state.detector.rebase()
        state.judged.clear()
        is_ours = state.plan == event.plan
        if is_ours:
            state.plan = None
        if is_ours and event.outcome is not MoveOutcome.DONE and state.before is not None:
            self._hold(state, state.before.short_of, now)
            state.before = None
        state.judge_from = now + self.limits.settle_s
        return [said]

    # --- the monitor ------------------------------------------------------------------------------

    def _on_window(self, event: WindowSeen, now: float) -> list[Effect]:
        state = self._state(event.scenario)
        event = replace(event, groups=self._steadied(state, event))
        window = event.window
        if window is None or state.plan is not None or now < state.judge_from:
            return []
        if state.before is not None:
            return self._judge(state, state.before, event, window, now)
        finding = state.detector.handle(window)
        if finding is None:
            return []
        return self._on_finding(state, finding, event, now)

    def _steadied(self, state: _Scenario, event: WindowSeen) -> Groups:
        """The scenario's groups with their load over as many windows as a finding takes.

        One window alone is noise.
        """
        groups = dict(event.groups)
        before, state.busy = state.busy, {}
        for group in serving(groups, event.scenario):
            shape = (group.num_prefill, group.num_decode)
            seen = before.get(group.group_id)
            if seen is None or seen.shape != shape:
                seen = _Busy(shape, deque(maxlen=self.limits.detector.num_windows))
            seen.recent.append((group.prefill_busy, group.decode_busy))
            state.busy[group.group_id] = seen
            groups[group.group_id] = replace(
                group, prefill_busy=seen.mean(0), decode_busy=seen.mean(1)
            )
        return groups

    def _on_finding(
        self, state: _Scenario, finding: Finding, event: WindowSeen, now: float
    ) -> list[Effect]:
        role = finding.short_of
        if role is None:
            return self._leave(state, "neither role stands out", finding.reason, event, now)
        if now < state.held_until and role is state.held_role:
            return self._leave(
                state, f"more {role.value}s, but it is too soon", finding.reason, event, now
            )
        reason = f"more {role.value}s: {finding.reason}"
        choice = one_step(
            role, event.scenario, event.groups, event.num_blank, self.limits.planner, reason
        )
        if choice.move is None:
            if not choice.is_needed:
                state.detector.rebase()  # the instances carry the load: this is the new normal
            why = f"{finding.reason}; {'; '.join(choice.reasons)}"
            return self._leave(state, f"more {role.value}s", why, event, now)
        plan = MovePlan(event.scenario, Trigger.MONITOR, (choice.move,), reason)
        state.plan, state.said = plan, ""
        seen = state.detector.recent
        state.before = _Before(
            _mean(w.e2e_s for w in seen),
            _mean(w.queue_s for w in seen),
            _mean(w.success_share for w in seen),
            _mean(w.answered_per_s for w in seen),
            event.rate_per_s,
            role,
            choice.move,
        )
        said = self._decided(event, RatioAction.PLANNED, reason, plan.moves)
        return [said, AskMoves(plan)]

    def _leave(
        self, state: _Scenario, kind: str, why: str, event: WindowSeen, now: float
    ) -> list[Effect]:
        """Leave it alone, and tell that once in a while, though each window finds it again."""
        if kind == state.said and now < state.silent_until:
            return []
        state.said, state.silent_until = kind, now + self.limits.hold_s
        return [self._decided(event, RatioAction.LEFT_ALONE, f"{kind}: {why}")]

    def _judge(
        self, state: _Scenario, before: _Before, event: WindowSeen, window: Window, now: float
    ) -> list[Effect]:
        """Decide whether a move helped. It is undone only for harm that was seen."""
        if window.num_requests < self.limits.detector.min_requests:
            return []
        state.judged.append(window)
        if len(state.judged) < self.limits.judge_windows:
            return []
        harm = self._harm(before, state.judged, event.rate_per_s)
        e2e = f"E2E {before.e2e_s:.3g} -> {_mean(w.e2e_s for w in state.judged):.3g} s"
        state.judged.clear()
        state.before = None
        state.detector.rebase()
        if harm is None:
            self._keep(state, before.short_of, now)
            return [self._decided(event, RatioAction.KEPT, e2e)]
        self._hold(state, before.short_of, now)
        back = inverse(before.move, harm)
        # The groups were like that before, so no survivor has to carry more than it did.
        state.plan = MovePlan(
            event.scenario, Trigger.MONITOR, (back,), f"undo: {harm}", is_forced=True
        )
        return [self._decided(event, RatioAction.UNDONE, harm, (back,)), AskMoves(state.plan)]

    def _harm(self, before: _Before, after: list[Window], rate_per_s: float) -> str | None:
        limits = self.limits
        e2e_s = _mean(w.e2e_s for w in after)
        queue_s = max(before.queue_s, _mean(w.queue_s for w in after))
        if queue_s > limits.waiting * min(before.e2e_s, e2e_s):
            # More came than was answered: the backlog grew while the move was made. So only the
            # pace of answers shows its effect.
            pace = _mean(w.answered_per_s for w in after)
            if pace < before.answered_per_s * (1 - limits.max_pace_drop):
                return f"answers fell from {before.answered_per_s:.3g} to {pace:.3g} per s"
            return None
        success = _mean(w.success_share for w in after)
        if success < before.success_share - limits.max_success_drop:
            return f"success fell from {before.success_share:.1%} to {success:.1%}"
        if rate_per_s > before.rate_per_s * (1 + limits.max_e2e_rise):
            return None  # more requests come: slower answers say nothing about the move
        if e2e_s > before.e2e_s * (1 + limits.max_e2e_rise):
            return f"E2E rose from {before.e2e_s:.3g} to {e2e_s:.3g} s"
        return None

    def _keep(self, state: _Scenario, role: Role, now: float) -> None:
        """Make the other direction wait, longer each time that the two alternate.

        If both roles are near their limit, noise would swing the ratio.
        """
        is_same = role is state.kept_role
        is_calm = now > state.held_until + self.limits.max_hold_s
        if state.kept_role is None or is_same or is_calm:
            state.hold_s = self.limits.hold_s
        state.kept_role = role
        self._hold(state, other(role), now)

    def _hold(self, state: _Scenario, role: Role, now: float) -> None:
        state.held_until, state.held_role = now + state.hold_s, role
        state.hold_s = min(2 * state.hold_s, self.limits.max_hold_s)

    def _decided(
        self, event: WindowSeen, action: RatioAction, reason: str, moves: tuple[Move, ...] = ()
    ) -> Decided:
        groups = tuple(serving(event.groups, event.scenario))
        return Decided(event.scenario, action, reason, event.window, groups, moves)


def _mean(values: Iterable[float]) -> float:
    return statistics.mean(values)
