"""The plan runner makes one move of a scenario at a time, and decides when a plan has ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.model import Role
from pdmesh.core.moves.move import (
    GroupShape,
    Move,
    MoveKind,
    MovePlan,
    Trigger,
)
from pdmesh.core.moves.next_move import (
    MAX_PLANS,
    RESUME_WITHIN_S,
    GroupsSeen,
    MoveEnded,
    MoveMade,
    MoveOutcome,
    PendingPlan,
    PlanAsked,
    PlanEnded,
    PlanResumed,
    PlanRunner,
    StartMove,
    resumable,
)

P, D = Role.PREFILL, Role.DECODE

GROUP = GroupShape("g0", "chat", 3, 5, 0.4, 0.6)


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


def test_a_plan_ends_at_a_move_that_failed_or_is_no_longer_allowed() -> None:
    runner = PlanRunner()
    runner.handle(asked(D, 2), 0.0)
    runner.handle(GroupsSeen({"g0": replace(GROUP, prefill_busy=0.1)}), 0.0)
    assert [type(e) for e in runner.handle(MoveEnded("chat", True), 1.0)] == [MoveMade]
    (ended,) = runner.handle(GroupsSeen({"g0": replace(GROUP, prefill_busy=0.9)}), 1.0)
    assert isinstance(ended, PlanEnded)
    assert (ended.outcome, ended.num_moves) == (MoveOutcome.REFUSED, 1)
    assert "busy" in ended.detail
    assert not runner.is_busy("chat")


@pytest.mark.req("S21")
@pytest.mark.parametrize(("is_moving", "num_late"), [(True, 1), (False, 0)])
def test_a_plan_that_an_earlier_leader_left_long_ago_ends_with_the_move_under_way(
    is_moving: bool, num_late: int
) -> None:
    moves = (Move("g0", MoveKind.CHANGE_ROLE, D),) * 3
    left = PendingPlan(MovePlan("chat", Trigger.SCHEDULE, moves, "night"), is_moving)
    groups = {"g0": replace(GROUP, prefill_busy=0.1)}
    for age_s, num_moves in ((RESUME_WITHIN_S, 3), (RESUME_WITHIN_S + 1, num_late)):
        runner = PlanRunner()
        assert len(resumable(left, age_s).moves) == num_moves
        runner.handle(PlanResumed(left, groups, age_s), 0.0)
        assert sum(len(each.plan.moves) for each in runner.outstanding()) == num_moves


def test_a_move_without_news_is_given_up_and_the_number_of_waiting_plans_is_bounded() -> None:
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
