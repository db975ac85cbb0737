"""Schedules on virtual time.

Each time of a schedule fires once, and lent groups are back in time.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, tzinfo

import pytest

from pdmesh.core.groups.desired import ScheduleLine
from pdmesh.core.moves.cron import Cron
from pdmesh.core.moves.move import (
    TRAINING_POOL,
    GroupShape,
    MoveKind,
    Trigger,
    applied,
)
from pdmesh.core.moves.schedule import Schedule, ScheduleAction, ScheduleEntry
from pdmesh.services.master_scheduler.groups.desired_convert import entries_from

DAY = 86_400.0
MIDNIGHT = datetime(2026, 11, 21, tzinfo=UTC).timestamp()  # 21 November 2026 is a Saturday
GROUPS = {f"chat-{i}": GroupShape(f"chat-{i}", "chat", 3, 5, 0.1, 0.1) for i in range(4)}


# --- entries --------------------------------------------------------------------------------------


def entry(what: ScheduleAction, cron: str, count: int = 2, name: str = "") -> ScheduleEntry:
    return ScheduleEntry(name or what.value, "chat", Cron.parse(cron), what, count)


@pytest.mark.req("S21")
def test_a_daily_schedule_for_two_groups_fires_once_within_a_second_of_its_time() -> None:
    schedule, fired = Schedule([entry(ScheduleAction.LEND, "0 8 * * *")]), []
    for day in range(3):
        for second in range(-60, 60):  # a shell ticks every second
            now = MIDNIGHT + day * DAY + 8 * 3600 + second + 0.5
            fired += [(now, due) for due in schedule.tick(GROUPS, now)]
    assert [due.at - MIDNIGHT for _, due in fired] == [8 * 3600 + n * DAY for n in range(3)]
    for now, due in fired:
        assert 0 <= now - due.at < 1
        assert due.plan is not None
        assert due.plan.trigger is Trigger.SCHEDULE
        assert [(m.kind, m.role, m.group_id) for m in due.plan.moves] == [
            (MoveKind.LEND, None, "chat-3"),
            (MoveKind.LEND, None, "chat-2"),
        ]


def test_ticking_more_often_fires_no_more() -> None:
    schedule = Schedule([entry(ScheduleAction.LEND, "0 8 * * *")])
    fired = [
        due
        for minute in range(24 * 60 * 2)
        for due in schedule.tick(GROUPS, MIDNIGHT + 60 * minute)
    ]
    assert len(fired) == 2


@pytest.mark.req("S11")
def test_the_next_time_of_a_schedule_is_computed_once_and_not_at_every_tick() -> None:
    """If each tick computed it, a thousand schedules would take a tenth of the leader's time."""
    asked: list[float] = []

    class Counted(Cron):
        def next_after(self, now: float, zone: tzinfo = UTC) -> float | None:
            asked.append(now)
            return Cron.next_after(self, now, zone)

    schedule = Schedule(
        [ScheduleEntry("lend", "chat", Counted.parse("0 12 * * *"), ScheduleAction.LEND, 1)]
    )
    for second in range(60):
        schedule.tick({}, MIDNIGHT + second)
    assert len(asked) == 1


def test_lent_groups_serve_again_at_the_time_that_was_asked_for() -> None:
    """A set-up takes ten minutes. The margin makes that a quarter of an hour, so the reclaim begins
    at 06:45.
    """
    night = [entry(ScheduleAction.LEND, "0 22 * * *"), entry(ScheduleAction.RECLAIM, "0 7 * * *")]
    schedule = Schedule(night)
    schedule.tick(GROUPS, MIDNIGHT + 8 * 3600)
    schedule.set_up_took("chat", 600.0)
    (due,) = schedule.tick(GROUPS, MIDNIGHT + 22 * 3600)
    assert due.plan is not None
    lent = GROUPS
    for move in due.plan.moves:
        assert (move.kind, move.to_group) == (MoveKind.LEND, TRAINING_POOL)
        lent = applied(lent, move)
    begin = MIDNIGHT + DAY + 7 * 3600 - 900
    assert schedule.tick(lent, begin - 1) == []
    (back,) = schedule.tick(lent, begin)
    assert back.plan is not None
    assert sorted(m.group_id for m in back.plan.moves) == sorted(m.group_id for m in due.plan.moves)
    assert {m.kind for m in back.plan.moves} == {MoveKind.RECLAIM}


def test_the_least_busy_groups_are_lent_and_among_equals_the_newest() -> None:
    groups = {**GROUPS, "chat-1": GroupShape("chat-1", "chat", 3, 5, 0.0, 0.05),
              "chat-3": GroupShape("chat-3", "chat", 3, 5, None, None)}  # fmt: skip
    schedule = Schedule([entry(ScheduleAction.LEND, "0 8 * * *")])
    schedule.tick(groups, MIDNIGHT)
    (due,) = schedule.tick(groups, MIDNIGHT + 8 * 3600)
    assert due.plan is not None
    assert [m.group_id for m in due.plan.moves] == ["chat-1", "chat-2"]


def test_a_master_that_was_away_makes_up_for_it_within_the_grace_and_says_so_beyond() -> None:
    entries = [entry(ScheduleAction.LEND, "0 8 * * *")]
    first = Schedule(entries)
    first.tick(GROUPS, MIDNIGHT)
    for away_s, is_done in ((600, True), (3600, False)):
        successor = Schedule(entries, fired=dict(first.fired))
        (due,) = successor.tick(GROUPS, MIDNIGHT + 8 * 3600 + away_s)
        assert due.late_s == away_s
        assert (due.plan is not None) == is_done
        assert successor.tick(GROUPS, MIDNIGHT + 8 * 3600 + away_s + 1) == []
    years = Schedule(entries, fired=dict(first.fired))
    assert len(years.tick(GROUPS, MIDNIGHT + 3650 * DAY)) == 1


def test_a_clock_that_was_years_ahead_for_a_moment_stops_no_schedule() -> None:
    """A machine without a battery boots, or a time server is wrong. A time that fired in that
    future must not block the schedule until then.
    """
    schedule = Schedule([entry(ScheduleAction.LEND, "0 8 * * *")])
    schedule.tick(GROUPS, MIDNIGHT)
    schedule.tick(GROUPS, MIDNIGHT + 3650 * DAY)
    assert schedule.tick(GROUPS, MIDNIGHT + 60) == []
    (due,) = schedule.tick(GROUPS, MIDNIGHT + 8 * 3600)
    assert due.plan is not None


@pytest.mark.parametrize("seconds", [1.0, 3600.0, 0.9 * DAY])
def test_a_clock_that_is_set_back_a_little_fires_nothing_twice(seconds: float) -> None:
    schedule = Schedule([entry(ScheduleAction.LEND, "0 8 * * *")])
    schedule.tick(GROUPS, MIDNIGHT)
    assert len(schedule.tick(GROUPS, MIDNIGHT + 8 * 3600)) == 1
    for _ in range(2):
        assert schedule.tick(GROUPS, MIDNIGHT + 8 * 3600 - seconds) == []
    assert schedule.tick(GROUPS, MIDNIGHT + 8 * 3600 + 1) == []


def test_an_entry_that_came_with_a_change_of_the_file_does_not_fire_for_the_past() -> None:
    schedule = Schedule([entry(ScheduleAction.LEND, "0 8 * * *")])
    schedule.tick(GROUPS, MIDNIGHT + 9 * 3600)
    schedule.replace_entries(
        [
            entry(ScheduleAction.LEND, "0 8 * * *"),
            entry(ScheduleAction.LEND, "59 8 * * *", name="late"),
        ]
    )
    assert schedule.tick(GROUPS, MIDNIGHT + 9 * 3600 + 60) == []
    with pytest.raises(ValueError, match="twice"):
        schedule.replace_entries([entry(ScheduleAction.LEND, "0 8 * * *")] * 2)


@pytest.mark.req("S21")
def test_a_reclaim_that_comes_within_its_lead_time_begins_at_once_and_once() -> None:
    """It is 06:56, and the groups must serve at 07:00. The reclaim takes five minutes, so it should
    have begun at 06:55.
    """
    lent = {i: replace(group, pool=TRAINING_POOL) for i, group in GROUPS.items()}
    schedule = Schedule([entry(ScheduleAction.LEND, "0 8 * * *")])
    schedule.tick(lent, MIDNIGHT)
    now = MIDNIGHT + 7 * 3600 - 240
    schedule.replace_entries(
        [entry(ScheduleAction.LEND, "0 8 * * *"), entry(ScheduleAction.RECLAIM, "0 7 * * *")]
    )
    (due,) = schedule.tick(lent, now)
    assert due.plan is not None
    assert due.at == MIDNIGHT + 7 * 3600
    assert not any(schedule.tick(lent, now + second) for second in range(1, 600))


def test_a_reclaim_with_a_long_lead_is_not_missed_before_its_time() -> None:
    lent = {i: replace(group, pool=TRAINING_POOL) for i, group in GROUPS.items()}
    schedule = Schedule([entry(ScheduleAction.RECLAIM, "0 7 * * *")], fired={"reclaim": MIDNIGHT})
    schedule.set_up_took("chat", 1200.0)  # so the reclaim begins half an hour before 07:00
    (due,) = schedule.tick(lent, MIDNIGHT + 7 * 3600 - 60)
    assert due.plan is not None
    assert due.late_s == 1740


def test_a_line_keeps_its_name_wherever_it_stands_and_however_it_is_spaced() -> None:
    lend = ScheduleLine("0 22 * * *", "chat", "lend")
    spaced = ScheduleLine(" 0  22 * * * ", "chat", "lend")
    other = ScheduleLine("0 21 * * *", "chat", "lend")
    more = ScheduleLine("0 22 * * *", "chat", "lend", pool="lab")
    (name,) = (e.name for e in entries_from([lend]))
    assert [e.name for e in entries_from([other, spaced])][1] == name
    assert len({e.name for e in entries_from([lend, lend, more, other])}) == 4


def test_a_schedule_with_nothing_to_do_makes_no_plan() -> None:
    schedule = Schedule([entry(ScheduleAction.RECLAIM, "0 8 * * *")])
    schedule.tick(GROUPS, MIDNIGHT)
    (due,) = schedule.tick(GROUPS, MIDNIGHT + 8 * 3600)
    assert (due.plan, due.reason) == (None, "no group to reclaim")
