"""The compressed day is a load test with the changes and faults of a day.

Its plan obeys the mesh's rules, and its record lists the events that did not happen.
"""

from __future__ import annotations

from loadtests.day import plan as day_plan
from loadtests.day.figure import Day, markdown
from loadtests.day.watch import Watch
from pdmesh.core.moves.cron import Cron
from pdmesh.desired_file import read
from pdmesh.v1 import admin_service_pb2 as pb

NOW = 1_795_219_211.0


def test_the_schedules_of_a_day_fall_on_the_times_of_its_plan() -> None:
    start = day_plan.next_start(NOW)
    assert 0 <= start - NOW < 60
    desired = read(day_plan.groups(start, "1"))
    acts = [Cron.parse(line.at).next_after(start) for line in desired.schedules]
    lead_s = 300  # a reclaim begins this many seconds early
    assert [at - start for at in acts if at is not None] == [
        day_plan.LEND_AT, day_plan.RECLAIM_AT + lead_s, day_plan.LEND_AGAIN_AT,
    ]  # fmt: skip
    after = read(day_plan.groups(start, "2"))
    assert after.groups == desired.groups
    assert after.services != desired.services


def test_every_window_of_the_day_has_enough_requests_for_a_ratio_when_content_changes() -> None:
    arrivals = list(day_plan.arrivals(1))
    for since in range(110, 230, 5):
        assert sum(since <= a.at_s < since + day_plan.WINDOW_S for a in arrivals) >= 20


def states(*adjustments: pb.GroupAdjustment) -> pb.ListGroupStatesResponse:
    lent = {a.group_id for a in adjustments if a.pool}
    groups = [
        pb.GroupState(group_id=name, num_prefill_wanted=1, num_decode_wanted=2)
        for name in ("a", "b")
        if name not in lent
    ]
    return pb.ListGroupStatesResponse(groups=groups, adjustments=adjustments)


def adjusted(
    group_id: str, num_prefill: int, num_decode: int, pool: str = ""
) -> pb.GroupAdjustment:
    return pb.GroupAdjustment(
        group_id=group_id, num_prefill=num_prefill, num_decode=num_decode, pool=pool, reason="why"
    )


def test_the_changes_of_plans_are_reported_once() -> None:
    watch = Watch()
    for look in (
        states(),
        states(adjusted("a", 2, 1)),
        states(adjusted("a", 2, 1), adjusted("b", 1, 2, "training")),
        states(adjusted("a", 2, 1), adjusted("b", 1, 2, "training")),
        states(adjusted("a", 2, 1)),
        states(),
    ):
        watch.look(look)
    assert [(a.kind, a.text) for a in watch.actions] == [
        ("move", "a: 1P:2D becomes 2P:1D (why)"),
        ("scale", "b is lent to training"),
        ("scale", "b is back"),
        ("move", "a: 2P:1D becomes 1P:2D"),
    ]
    assert watch.moves == [(1, -1), (-1, 1)]


def test_a_record_lists_the_events_that_did_not_happen() -> None:
    day = Day("on a mesh", "make bench NAME=day", 288.0, 10, 1, missed=["the upgrade"])
    assert "**Did not happen: the upgrade.**" in markdown(day)
