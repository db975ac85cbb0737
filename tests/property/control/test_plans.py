"""Plans of moves for one scenario, by schedule and by hand, never overlap.

The moves take any time and end in any order.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.moves.cron import Cron
from pdmesh.core.moves.move import (
    TRAINING_POOL,
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
    PlanAsked,
    PlanRunner,
    StartMove,
)
from pdmesh.core.moves.schedule import Schedule, ScheduleAction, ScheduleEntry

MIDNIGHT = datetime(2026, 11, 21, tzinfo=UTC).timestamp()  # 21 November 2026 is a Saturday

GROUPS = {f"chat-{i}": GroupShape(f"chat-{i}", "chat", 3, 5, 0.1, 0.1) for i in range(4)}


def entry(what: ScheduleAction, cron: str, count: int = 2, name: str = "") -> ScheduleEntry:
    return ScheduleEntry(name or what.value, "chat", Cron.parse(cron), what, count)


@pytest.mark.req("S21")
@given(delays=st.lists(st.floats(1, timedelta(minutes=30).total_seconds()), min_size=6, max_size=6))
def test_timed_and_manual_plans_of_a_scenario_never_overlap(delays: list[float]) -> None:
    schedule = Schedule(
        [
            entry(ScheduleAction.LEND, "0 8 * * *", 1, "first"),
            entry(ScheduleAction.LEND, "10 8 * * *", 1, "second"),
        ]
    )
    runner, groups, now = PlanRunner(), dict(GROUPS), MIDNIGHT + 7 * 3600
    by_hand = Move("chat-0", MoveKind.LEND, None, TRAINING_POOL)
    manual = [MovePlan("chat", Trigger.OPERATOR, (by_hand,), "by hand")]
    moving: tuple[float, StartMove] | None = None
    num_moves = 0
    while now < MIDNIGHT + 11 * 3600:
        now += 30
        plans = [due.plan for due in schedule.tick(runner.expected(groups), now)]
        plans += [manual.pop()] if manual and now > MIDNIGHT + 8 * 3600 + 300 else []
        for plan in plans:
            assert plan is not None
            runner.handle(PlanAsked(plan), now)
        if moving is not None and moving[0] <= now:
            groups = applied(groups, moving[1].move)
            moving = None
            runner.handle(MoveEnded("chat", True), now)
        for effect in runner.handle(GroupsSeen(groups), now):
            if isinstance(effect, StartMove):
                assert moving is None
                moving = (now + delays[num_moves], effect)
                num_moves += 1
        runner.check_invariants()
    assert num_moves == 3
