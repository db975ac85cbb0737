"""The ratio loop: three triggers, one kind of plan; single moves; what does harm is undone; every
decision has its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from pdmesh.core.model import Role
from pdmesh.core.moves.move import (
    GroupShape,
    Move,
    MoveKind,
    MovePlan,
    Trigger,
    applied,
)
from pdmesh.core.moves.plan_runner import (
    MAX_PLANS,
    GroupsSeen,
    MoveEnded,
    MoveMade,
    MoveOutcome,
    PlanAsked,
    PlanEnded,
    PlanRunner,
    StartMove,
)
from pdmesh.core.ratio.detector import Window
from pdmesh.core.ratio.loop import (
    AskMoves,
    Decided,
    OperatorAsked,
    Profiled,
    RatioAction,
    RatioController,
    WindowSeen,
)
from pdmesh.core.ratio.model import Profile, Split
from pdmesh.core.ratio.planner import PlannerLimits, changes_to, one_step

P, D = Role.PREFILL, Role.DECODE
GROUP = GroupShape("g0", "chat", 3, 5, 0.4, 0.6)
CALM = Window(100, 0.0, 0.5, 2.0, 1.0, 0.4, 0.6)
LONGER = replace(CALM, t_d_s=3.2, decode_busy=0.8)
WINDOW_S = 10.0


@dataclass
class Loop:
    """Controller and runner as a shell joins them; each move takes a minute and is made."""

    groups: dict[str, GroupShape] = field(default_factory=lambda: {"g0": GROUP})
    num_blank: int = 0
    now: float = 0.0
    controller: RatioController = field(default_factory=RatioController)
    runner: PlanRunner = field(default_factory=PlanRunner)
    decisions: list[Decided] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    ends: list[PlanEnded] = field(default_factory=list)
    in_flight: list[tuple[float, Move]] = field(default_factory=list)

    def windows(self, window: Window | None, count: int, rate_per_s: float = 10.0) -> None:
        for _ in range(count):
            self.now += WINDOW_S
            for due, move in self.in_flight[:]:
                if due <= self.now:
                    self.in_flight.remove((due, move))
                    self.groups = applied(self.groups, move)
                    self._run(MoveEnded("chat", True))
            if window is not None:
                self.groups = {
                    i: replace(g, prefill_busy=window.prefill_busy, decode_busy=window.decode_busy)
                    for i, g in self.groups.items()
                }
            self.tell(WindowSeen("chat", window, self.groups, self.num_blank, rate_per_s))
            self._run(GroupsSeen(self.groups, self.num_blank))

    def tell(self, event: WindowSeen | Profiled | OperatorAsked | PlanEnded) -> None:
        for effect in self.controller.handle(event, self.now):
            match effect:
                case Decided():
                    self.decisions.append(effect)
                case AskMoves():
                    self._run(PlanAsked(effect.plan))

    def _run(self, event: PlanAsked | MoveEnded | GroupsSeen) -> None:
        for effect in self.runner.handle(event, self.now):
            match effect:
                case StartMove():
                    assert not self.in_flight
                    self.moves.append(effect.move)
                    self.in_flight.append((self.now + 60, effect.move))
                case PlanEnded():
                    self.ends.append(effect)
                    self.tell(effect)
        self.runner.check_invariants()

    @property
    def actions(self) -> list[RatioAction]:
        return [d.action for d in self.decisions]


@pytest.mark.req("S29")
def test_each_of_hundreds_of_scenarios_is_remembered_until_it_has_no_groups() -> None:
    """Beyond 256 each one was forgotten before its next window, and nothing was ever found."""
    controller, names = RatioController(), [f"s{i}" for i in range(300)]
    planned = set()
    for window in [CALM] * 10 + [LONGER] * 3:
        for name in names:
            group = replace(
                GROUP,
                scenario=name,
                prefill_busy=window.prefill_busy,
                decode_busy=window.decode_busy,
            )
            seen = WindowSeen(name, window, {"g0": group}, 0, 10.0)
            effects = controller.handle(seen, 0.0)
            planned |= {e.plan.scenario for e in effects if isinstance(e, AskMoves)}
        controller.keep_only(names)
    assert planned == set(names)
    controller.keep_only(["s0"])
    assert len(controller._scenarios) == 1


@pytest.mark.req("S27", "S28", "S29")
def test_longer_outputs_move_one_instance_to_decode_and_no_second_one() -> None:
    loop = Loop()
    loop.windows(CALM, 10)
    loop.windows(LONGER, 3)
    loop.windows(replace(LONGER, t_d_s=2.6, decode_busy=0.67), 60)
    assert [(m.kind, m.role) for m in loop.moves] == [(MoveKind.CHANGE_ROLE, D)]
    assert loop.actions == [RatioAction.PLANNED, RatioAction.ENDED, RatioAction.KEPT]
    planned = loop.decisions[0]
    assert "E2E 2.5 -> 3.7 s" in planned.reason
    assert planned.window == LONGER
    assert planned.groups[0].decode_busy == 0.8


@pytest.mark.req("S28")
def test_a_move_after_which_fewer_are_answered_in_time_is_undone_and_not_repeated_at_once() -> None:
    loop = Loop()
    loop.windows(CALM, 10)
    loop.windows(LONGER, 3)
    harmed = replace(LONGER, success_share=0.9)
    loop.windows(harmed, 30)
    assert [m.role for m in loop.moves[:2]] == [D, P]
    assert RatioAction.UNDONE in loop.actions
    assert (loop.groups["g0"].num_prefill, loop.groups["g0"].num_decode) == (3, 5)
    num_before = len(loop.moves)
    loop.windows(replace(LONGER, t_d_s=9.9), 6)  # within the hold
    assert len(loop.moves) == num_before


@pytest.mark.req("S28")
@pytest.mark.parametrize(("pace", "is_undone"), [(9.0, True), (12.0, False)])
def test_where_requests_wait_only_the_pace_of_answers_judges(pace: float, is_undone: bool) -> None:
    """The backlog grows while the move is made: E2E and success get worse whatever it does."""
    loop = Loop()
    full = replace(CALM, queue_s=2.0, prefill_busy=1.0, decode_busy=0.3, answered_per_s=10.0)
    loop.windows(full, 3)
    worse = replace(full, queue_s=20.0, success_share=0.5, prefill_busy=0.95, answered_per_s=pace)
    loop.windows(worse, 14)
    assert (RatioAction.UNDONE in loop.actions) == is_undone
    assert (RatioAction.KEPT in loop.actions) != is_undone


@pytest.mark.req("S28")
def test_slower_answers_are_no_harm_if_more_is_asked_for() -> None:
    loop = Loop()
    loop.windows(CALM, 10)
    loop.windows(LONGER, 3)
    loop.windows(replace(LONGER, t_d_s=5.0), 20, rate_per_s=20.0)
    assert RatioAction.UNDONE not in loop.actions


@pytest.mark.req("S28")
def test_windows_without_numbers_change_nothing_and_judge_nothing() -> None:
    loop = Loop()
    loop.windows(CALM, 10)
    loop.windows(None, 1000)
    assert loop.decisions == []
    loop.windows(LONGER, 3)
    loop.windows(None, 1000)
    assert loop.actions == [RatioAction.PLANNED, RatioAction.ENDED]


@pytest.mark.req("S28")
def test_a_finding_about_a_role_that_has_room_is_told_once_and_becomes_normal() -> None:
    loop = Loop()
    loop.windows(replace(CALM, decode_busy=0.1), 10)
    loop.windows(replace(LONGER, decode_busy=0.15), 200)
    assert loop.moves == []
    assert loop.actions == [RatioAction.LEFT_ALONE]
    assert "none is short" in loop.decisions[0].reason


@pytest.mark.req("S27", "S30")
def test_three_triggers_make_the_same_kind_of_plan_with_a_reason() -> None:
    monitor, profiled, operator = Loop(), Loop(), Loop()
    monitor.windows(CALM, 10)
    monitor.windows(LONGER, 5)
    profile = Profile(
        t_p=0.5, b_p=4, t_d=8.0, b_d=16
    )  # decode carries a quarter of what prefill does
    profiled.tell(Profiled("chat", profile, profiled.groups))
    asked = MovePlan("chat", Trigger.OPERATOR, (Move("g0", MoveKind.CHANGE_ROLE, D),), "by hand")
    operator.tell(OperatorAsked(asked))
    for loop in (profiled, operator):
        loop.windows(CALM, 30)
    for loop, trigger in (
        (monitor, Trigger.MONITOR), (profiled, Trigger.PROFILE), (operator, Trigger.OPERATOR)
    ):  # fmt: skip
        assert all(isinstance(m, Move) and m.kind is MoveKind.CHANGE_ROLE for m in loop.moves)
        assert loop.moves
        assert all(e.plan.trigger is trigger and e.plan.reason for e in loop.ends)
    assert operator.ends[0].outcome is MoveOutcome.DONE


@pytest.mark.req("S30")
def test_a_profile_leads_to_its_best_split_group_by_group() -> None:
    groups = {f"g{i}": replace(GROUP, group_id=f"g{i}", decode_busy=0.2) for i in range(2)}
    loop = Loop(groups)
    profile = Profile(t_p=1.0, b_p=1, t_d=1.0, b_d=3)  # three prefills to a decode
    loop.tell(Profiled("chat", profile, groups))
    loop.windows(replace(CALM, decode_busy=0.2), 60)
    assert [(g.num_prefill, g.num_decode) for g in loop.groups.values()] == [(6, 2), (6, 2)]
    assert [m.group_id for m in loop.moves] == ["g0"] * 3 + ["g1"] * 3


# --- the planner ----------------------------------------------------------------------------------


def test_a_blank_instance_is_taken_where_the_other_role_has_no_room() -> None:
    tight = {"g0": replace(GROUP, prefill_busy=0.9, decode_busy=0.8)}
    choice = one_step(P, "chat", tight, 1, PlannerLimits(), "why")
    assert choice.move == Move("g0", MoveKind.ADD, P, None, "why")
    choice = one_step(P, "chat", tight, 0, PlannerLimits(), "why")
    assert choice.move is None
    assert choice.reasons == (
        "change_role: the other decodes would be 100% busy",
        "add: no blank instance",
    )


def test_else_one_of_another_group_of_the_same_model_is_moved() -> None:
    groups = {
        "g0": replace(GROUP, prefill_busy=0.9, decode_busy=0.8, model="m"),
        "idle": GroupShape("idle", "code", 4, 4, 0.1, 0.1, model="m"),
        "other": GroupShape("other", "code", 4, 4, 0.0, 0.0, model="n"),
    }
    choice = one_step(P, "chat", groups, 0, PlannerLimits(), "why")
    assert choice.move == Move("idle", MoveKind.MOVE, P, "g0", "why")


def test_a_role_change_that_would_only_turn_the_bottleneck_round_is_no_candidate() -> None:
    """2 decodes at 60 % leave one at 120 %: the shortage would be theirs."""
    choice = one_step(
        P, "chat", {"g0": replace(GROUP, num_decode=2, prefill_busy=0.9)}, 0, PlannerLimits(), ""
    )
    assert choice.move is None


@pytest.mark.parametrize("split", [Split(p, d) for p in range(1, 7) for d in range(1, 7)])
def test_changes_lead_from_what_is_there_to_what_is_wanted(split: Split) -> None:
    groups = {"g0": GROUP}
    moves = changes_to(split, GROUP, "")
    for move in moves:
        groups = applied(groups, move)
    assert (groups["g0"].num_prefill, groups["g0"].num_decode) == (
        split.num_prefill,
        split.num_decode,
    )
    assert len(moves) == max(
        abs(split.num_prefill - 3), abs(split.num_decode - 5), abs(split.total - 8)
    )


# --- the runner -----------------------------------------------------------------------------------


def asked(role: Role, count: int = 1, scenario: str = "chat") -> PlanAsked:
    moves = (Move("g0" if scenario == "chat" else "h0", MoveKind.CHANGE_ROLE, role),) * count
    return PlanAsked(MovePlan(scenario, Trigger.OPERATOR, moves, "test"))


@pytest.mark.req("S21")
def test_plans_of_a_scenario_run_one_after_the_other_and_those_of_others_beside_them() -> None:
    runner = PlanRunner()
    groups = {
        "g0": replace(GROUP, prefill_busy=0.1),
        "h0": replace(GROUP, group_id="h0", scenario="code", prefill_busy=0.1),
    }
    for event in (asked(D), asked(P), asked(D, scenario="code")):
        assert runner.handle(event, 0.0) == []
    started = runner.handle(GroupsSeen(groups), 0.0)
    assert [e.move.group_id for e in started if isinstance(e, StartMove)] == ["g0", "h0"]
    assert runner.handle(GroupsSeen(groups), 1.0) == []
    made, ended = runner.handle(MoveEnded("chat", True), 2.0)
    assert isinstance(made, MoveMade)
    assert (made.move.role, made.took_s) == (D, 2.0)
    assert isinstance(ended, PlanEnded)
    (second,) = runner.handle(GroupsSeen(groups), 2.0)
    assert isinstance(second, StartMove)
    assert second.move.role is P


def test_a_plan_ends_at_the_move_that_failed_or_may_not_be_made_any_more() -> None:
    runner = PlanRunner()
    runner.handle(asked(D, 2), 0.0)
    runner.handle(GroupsSeen({"g0": replace(GROUP, prefill_busy=0.1)}), 0.0)
    assert [type(e) for e in runner.handle(MoveEnded("chat", True), 1.0)] == [MoveMade]
    (ended,) = runner.handle(GroupsSeen({"g0": replace(GROUP, prefill_busy=0.9)}), 1.0)
    assert isinstance(ended, PlanEnded)
    assert (ended.outcome, ended.num_moves) == (MoveOutcome.REFUSED, 1)
    assert "busy" in ended.detail
    assert not runner.is_busy("chat")


def test_a_move_of_which_nothing_is_heard_is_given_up_and_waiting_plans_have_a_bound() -> None:
    runner = PlanRunner(move_timeout_s=100)
    groups = {"g0": replace(GROUP, prefill_busy=0.1)}
    runner.handle(asked(D), 0.0)
    runner.handle(GroupsSeen(groups), 0.0)
    assert [m.role for m in runner.moving.values()] == [D]
    (ended,) = runner.handle(GroupsSeen(groups), 101.0)
    assert isinstance(ended, PlanEnded)
    assert ended.outcome is MoveOutcome.FAILED
    for _ in range(MAX_PLANS):
        assert runner.handle(asked(D), 0.0) == []
    (refused,) = runner.handle(asked(D), 0.0)
    assert isinstance(refused, PlanEnded)
    assert refused.outcome is MoveOutcome.REFUSED
