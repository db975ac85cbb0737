"""Decides how a scenario's ratio of prefills to decodes changes (S27-S32).

A scenario is a kind of requests with its own groups of instances. The controller gets measurements
of the scenario's requests, window by window. If they show that there are too few prefills or
decodes, it plans one move of an instance, and waits until the move can have an effect. Then
`verdict.py` decides whether the move stays or is undone. After that the detector learns its
reference again, so that one change of the workload causes one move. Decisions are reported as
`RatioDecided` with their inputs. If the same reason forbids a move again and again, it is reported
once per `hold_s`.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from pdmesh.core.flight_recorder import FlightRecorder, recorded
from pdmesh.core.moves.move import (
    Groups,
    GroupShape,
    Move,
    MovePlan,
    Trigger,
    inverse,
    serving,
)
from pdmesh.core.moves.next_move import MoveOutcome, PlanEnded
from pdmesh.core.ratio.bottleneck import (
    BottleneckDetector,
    DetectorLimits,
    Finding,
    Window,
)
from pdmesh.core.ratio.planner import PlannerLimits, moves_to_best_split, next_move
from pdmesh.core.ratio.throughput import Profile
from pdmesh.core.ratio.verdict import Cooldown, MoveTrial, VerdictLimits


@dataclass(frozen=True, slots=True)
class RatioLimits:
    """The limits of the controller, in seconds and shares.

    `settle_s` is the time after a move until windows have no more requests from before the move.
    """

    detector: DetectorLimits = field(default_factory=DetectorLimits)
    planner: PlannerLimits = field(default_factory=PlannerLimits)
    verdict: VerdictLimits = field(default_factory=VerdictLimits)
    settle_s: float = 30.0
    # For this time a failed move is not repeated, and a good move is not reversed. The time doubles
    # with each failed move, and with each good move that reverses the one before.
    hold_s: float = 300.0
    max_hold_s: float = 3600.0


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WindowSeen:
    """A window of a scenario's requests has ended.

    `window` is None if the window's numbers are unknown or say nothing about the ratio.
    `rate_per_s` is the rate of arriving requests.
    """

    scenario: str
    window: Window | None
    groups: Groups
    num_blank: int = 0
    rate_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ScenarioProfiled:
    """A profile measured in advance gives the times of the scenario's requests."""

    scenario: str
    profile: Profile
    groups: Groups


@dataclass(frozen=True, slots=True)
class OperatorAsked:
    plan: MovePlan


Event = WindowSeen | ScenarioProfiled | OperatorAsked | PlanEnded

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
class RatioDecided:
    """A decision about a scenario, with its reason and numbers, for the log and the status page."""

    scenario: str
    action: RatioAction
    reason: str
    window: Window | None = None
    groups: tuple[GroupShape, ...] = ()
    moves: tuple[Move, ...] = ()


Effect = AskMoves | RatioDecided


@dataclass(slots=True)
class _Busy:
    """A group's load over the last windows.

    Old values are dropped when the group's shape changes.
    """

    shape: tuple[int, int]
    recent: deque[tuple[float | None, float | None]]

    def mean(self, at: int) -> float | None:
        values = [each[at] for each in self.recent]
        known = [busy for busy in values if busy is not None]
        return statistics.mean(known) if len(known) == len(values) else None


@dataclass(slots=True)
class _Scenario:
    detector: BottleneckDetector
    cooldown: Cooldown
    trial: MoveTrial | None = None  # while this controller's move is being made or judged
    plan: MovePlan | None = None  # this controller's plan of moves, until it ends
    judge_from: float = 0.0
    busy: dict[str, _Busy] = field(default_factory=dict)  # by group
    said: str = ""  # the last reported reason to do nothing; not repeated before `silent_until`
    silent_until: float = -math.inf


@dataclass(slots=True)
class RatioController:
    limits: RatioLimits = field(default_factory=RatioLimits)
    _scenarios: dict[str, _Scenario] = field(default_factory=dict)
    recorder: FlightRecorder = field(default_factory=FlightRecorder, repr=False, compare=False)

    @recorded
    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case WindowSeen():
                return self._on_window(event, now)
            case ScenarioProfiled():
                return self._on_profile(event)
            case OperatorAsked():
                plan = event.plan
                said = RatioDecided(
                    plan.scenario, RatioAction.PLANNED, plan.reason, moves=plan.moves
                )
                return [said, AskMoves(plan)]
            case PlanEnded():
                return self._on_ended(event, now)

    def keep_only(self, scenarios: Collection[str]) -> None:
        """Forget all other scenarios, because they have no groups any more."""
        self._scenarios = {s: state for s, state in self._scenarios.items() if s in scenarios}

    def _state(self, scenario: str) -> _Scenario:
        state = self._scenarios.get(scenario)
        if state is None:
            state = self._scenarios[scenario] = _Scenario(
                BottleneckDetector(self.limits.detector),
                Cooldown(self.limits.hold_s, self.limits.max_hold_s),
            )
        return state

    # --- profile and operator ---------------------------------------------------------------------

    def _on_profile(self, event: ScenarioProfiled) -> list[Effect]:
        own = serving(event.groups, event.scenario)
        numbers = (
            f"b_p/T_p {event.profile.prefill_per_s:.3g}/s, b_d/T_d "
            f"{event.profile.decode_per_s:.3g}/s"
        )
        moves = moves_to_best_split(event.profile, own, numbers)
        if not moves:
            return [
                RatioDecided(event.scenario, RatioAction.LEFT_ALONE, numbers, groups=tuple(own))
            ]
        plan = MovePlan(event.scenario, Trigger.PROFILE, moves, numbers)
        said = RatioDecided(
            event.scenario, RatioAction.PLANNED, numbers, groups=tuple(own), moves=moves
        )
        return [said, AskMoves(plan)]

    def _on_ended(self, event: PlanEnded, now: float) -> list[Effect]:
        state = self._state(event.plan.scenario)
        text = (
            f"{event.plan.trigger.value} plan {event.outcome.value}: {event.num_moves} of "
            f"{len(event.plan.moves)} moves"
        )
        said = RatioDecided(
            event.plan.scenario,
            RatioAction.ENDED,
            f"{text}; {event.detail}" if event.detail else text,
            moves=event.plan.moves,
        )
        state.detector.rebase()
        if state.trial is not None:
            state.trial.restart()
        if state.plan == event.plan:
            state.plan = None
            if event.outcome is not MoveOutcome.DONE and state.trial is not None:
                state.cooldown.failed(state.trial.short_of, now)
                state.trial = None
        state.judge_from = now + self.limits.settle_s
        return [said]

    # --- the monitor ------------------------------------------------------------------------------

    def _on_window(self, event: WindowSeen, now: float) -> list[Effect]:
        state = self._state(event.scenario)
        event = replace(event, groups=self._steadied(state, event))
        window = event.window
        if window is None or state.plan is not None or now < state.judge_from:
            return []
        if state.trial is not None:
            return self._judge(state, state.trial, event, window, now)
        finding = state.detector.handle(window)
        if finding is None:
            return []
        return self._on_finding(state, finding, event, now)

    def _steadied(self, state: _Scenario, event: WindowSeen) -> Groups:
        """Replace the loads of the scenario's groups by their means over the last windows.

        The load of a single window has too much noise.
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
        if state.cooldown.covers(role, now):
            return self._leave(
                state, f"more {role.value}s, but it is too soon", finding.reason, event, now
            )
        reason = f"more {role.value}s: {finding.reason}"
        choice = next_move(
            role, event.scenario, event.groups, event.num_blank, self.limits.planner, reason
        )
        if choice.move is None:
            if not choice.is_needed:
                state.detector.rebase()  # the instances carry the load, so it counts as normal now
            why = f"{finding.reason}; {'; '.join(choice.reasons)}"
            return self._leave(state, f"more {role.value}s", why, event, now)
        plan = MovePlan(event.scenario, Trigger.MONITOR, (choice.move,), reason)
        state.plan, state.said = plan, ""
        before = state.detector.recent
        state.trial = MoveTrial(choice.move, role, before, event.rate_per_s, self.limits.verdict)
        said = self._decided(event, RatioAction.PLANNED, reason, plan.moves)
        return [said, AskMoves(plan)]

    def _leave(
        self, state: _Scenario, kind: str, why: str, event: WindowSeen, now: float
    ) -> list[Effect]:
        """Report why the scenario is left as it is. A repeated reason is reported only rarely."""
        if kind == state.said and now < state.silent_until:
            return []
        state.said, state.silent_until = kind, now + self.limits.hold_s
        return [self._decided(event, RatioAction.LEFT_ALONE, f"{kind}: {why}")]

    def _judge(
        self, state: _Scenario, trial: MoveTrial, event: WindowSeen, window: Window, now: float
    ) -> list[Effect]:
        """Let the trial judge the window. At a verdict, keep the move or undo it."""
        if window.num_requests < self.limits.detector.min_requests:
            return []
        verdict = trial.judge(window, event.rate_per_s)
        if verdict is None:
            return []
        state.trial = None
        state.detector.rebase()
        if not verdict.harm:
            state.cooldown.kept(trial.short_of, now)
            return [self._decided(event, RatioAction.KEPT, verdict.e2e_text)]
        state.cooldown.failed(trial.short_of, now)
        back = inverse(trial.move, verdict.harm)
        # Forced, because the groups had the same counts before the move and could carry the load.
        state.plan = MovePlan(
            event.scenario, Trigger.MONITOR, (back,), f"undo: {verdict.harm}", is_forced=True
        )
        return [
            self._decided(event, RatioAction.UNDONE, verdict.harm, (back,)),
            AskMoves(state.plan),
        ]

    def _decided(
        self, event: WindowSeen, action: RatioAction, reason: str, moves: tuple[Move, ...] = ()
    ) -> RatioDecided:
        groups = tuple(serving(event.groups, event.scenario))
        return RatioDecided(event.scenario, action, reason, event.window, groups, moves)
