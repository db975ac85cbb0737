"""Tests whether a new revision answers as well as the old one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.upgrade.revision_health import (
    Answers,
    AnswerTimes,
    LegFailureReported,
    RequestAnswered,
    Tally,
    is_failed_leg,
    why_too_many,
    why_worse,
)
from tests.fakes.group_world import UPGRADE
from tests.fakes.upgrading_world import (
    NEW,
    OLD,
)


def test_answers_are_compared_only_where_there_are_enough() -> None:
    well = Tally(num=100, num_tpot=100, t_p_s=10.0, tpot_s=1.0)
    assert why_worse(well, well, UPGRADE) == ""
    assert why_worse(replace(well, t_p_s=30.0), well, UPGRADE) == "T_p is 300 ms instead of 100 ms"
    assert (
        why_worse(replace(well, tpot_s=4.0), well, UPGRADE)
        == "a token takes 40 ms instead of 10 ms"
    )
    assert why_worse(replace(well, t_p_s=30.0), Tally(), UPGRADE) == ""
    assert why_worse(replace(well, num_failed=2), well, UPGRADE) == ""
    assert why_worse(replace(well, num_failed=3), well, UPGRADE) == "2.9% of its requests failed"


def test_answers_are_kept_for_ten_minutes_by_group_and_revision() -> None:
    answers = Answers()
    for second in range(0, 1200, 5):
        answers.handle(RequestAnswered(("a", NEW), 0.1, None), float(second))
    answers.handle(LegFailureReported(("a", OLD)), 1200.0)
    assert answers.of([("a", NEW)], 0.0, 1300.0).num == 120
    assert answers.of([("a", NEW), ("a", OLD)], 1190.0, 1300.0).num_failed == 1
    assert answers.of([("b", NEW)], 0.0, 1300.0) == Tally()


@pytest.mark.req("S24")
def test_one_lost_instance_may_be_chance_and_two_are_named() -> None:
    assert why_too_many({}) == ""
    assert why_too_many({"d-1": "lost"}) == ""
    assert why_too_many({"p-0": "level 3", "d-1": "lost"}) == "d-1: lost, p-0: level 3"


@pytest.mark.parametrize(
    ("reason", "request_id", "is_failed"),
    [
        ("ENGINE_FAILED", "r", True),
        ("ENGINE_FAILED", "", False),
        ("KV_SOURCE_RELEASED", "r", False),
        ("KV_SOURCE_EXCLUDED", "r", False),
    ],
)
def test_an_error_counts_as_a_failed_leg_unless_it_is_only_told_beside_one(
    reason: str, request_id: str, is_failed: bool
) -> None:
    assert is_failed_leg(reason, request_id) is is_failed


def test_the_times_of_an_answer_leave_out_its_time_in_the_queue() -> None:
    times = AnswerTimes(queued_s=1.0, first_token_s=1.5, end_s=3.5)
    assert times.t_p_s(is_pooling=False) == 0.5
    assert times.t_p_s(is_pooling=True) == 2.5
    assert times.tpot_s(11) == pytest.approx(0.2)
    assert times.tpot_s(1) is times.tpot_s(0) is None
    assert AnswerTimes(2.0, 1.0, 0.5).t_p_s(is_pooling=False) == 0.0, "clocks differ"
