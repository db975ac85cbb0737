"""The loop that keeps the ratio of prefills to decodes right.

Three triggers lead to one kind of plan. The loop makes single moves, undoes harmful ones, and shows
the inputs of every decision.
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
from pdmesh.core.moves.next_move import (
    GroupsSeen,
    MoveEnded,
    MoveOutcome,
    PlanAsked,
    PlanEnded,
    PlanRunner,
    StartMove,
)
from pdmesh.core.ratio.bottleneck import Window
from pdmesh.core.ratio.controller import (
    AskMoves,
    OperatorAsked,
    RatioAction,
    RatioController,
    RatioDecided,
    ScenarioProfiled,
    WindowSeen,
)
from pdmesh.core.ratio.throughput import Profile

P, D = Role.PREFILL, Role.DECODE
GROUP = GroupShape("g0", "chat", 3, 5, 0.4, 0.6)
CALM = Window(100, 0.0, 0.5, 2.0, 1.0, 0.4, 0.6)
LONGER = replace(CALM, t_d_s=3.2, decode_busy=0.8)
WINDOW_S = 10.0


@dataclass
class Loop:
    """Controller and runner, joined as in a shell. Each move takes a minute and succeeds."""

    groups: dict[str, GroupShape] = field(default_factory=lambda: {"g0": GROUP})
    num_blank: int = 0
    now: float = 0.0
    controller: RatioController = field(default_factory=RatioController)
    runner: PlanRunner = field(default_factory=PlanRunner)
    decisions: list[RatioDecided] = field(default_factory=list)
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

    def tell(self, event: WindowSeen | ScenarioProfiled | OperatorAsked | PlanEnded) -> None:
        for effect in self.controller.handle(event, self.now):
            match effect:
                case RatioDecided():
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
    """The controller once remembered only 256 scenarios. With more, it forgot each scenario before
    the scenario's next window, and never found a bottleneck.
    """
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
def test_a_move_that_makes_answers_late_is_undone_and_not_repeated_at_once() -> None:
    loop = Loop()
    loop.windows(CALM, 10)
    loop.windows(LONGER, 3)
    harmed = replace(LONGER, success_share=0.9)
    loop.windows(harmed, 30)
    assert [m.role for m in loop.moves[:2]] == [D, P]
    assert RatioAction.UNDONE in loop.actions
    assert (loop.groups["g0"].num_prefill, loop.groups["g0"].num_decode) == (3, 5)
    num_before = len(loop.moves)
    loop.windows(replace(LONGER, t_d_s=9.9), 6)  # during the cooldown
    assert len(loop.moves) == num_before


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
def test_a_finding_about_a_role_that_has_room_is_reported_once_and_then_counts_as_normal() -> None:
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
    )  # a decode carries a quarter of what a prefill carries
    profiled.tell(ScenarioProfiled("chat", profile, profiled.groups))
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
    # the best split has three prefills for each decode
    profile = Profile(t_p=1.0, b_p=1, t_d=1.0, b_d=3)
    loop.tell(ScenarioProfiled("chat", profile, groups))
    loop.windows(replace(CALM, decode_busy=0.2), 60)
    assert [(g.num_prefill, g.num_decode) for g in loop.groups.values()] == [(6, 2), (6, 2)]
    assert [m.group_id for m in loop.moves] == ["g0"] * 3 + ["g1"] * 3


def asked(role: Role, count: int = 1, scenario: str = "chat") -> PlanAsked:
    moves = (Move("g0" if scenario == "chat" else "h0", MoveKind.CHANGE_ROLE, role),) * count
    return PlanAsked(MovePlan(scenario, Trigger.OPERATOR, moves, "test"))
