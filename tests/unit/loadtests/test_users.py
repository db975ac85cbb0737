"""The prompts of the load test's users, and the report about their answers."""

from __future__ import annotations

from collections import Counter

import pytest

from loadtests.traffic.loops import Answer
from loadtests.users.plan import (
    BLOCK_SIZE,
    CAPACITY_PER_S,
    NUM_TOKENS,
    ON_DEMAND,
    PREFIX_TOKENS,
    QUEUES,
    Prompts,
)
from loadtests.users.report import Point, bars, point

ARRIVAL = Prompts(1)()


def answer(sent_at: float, ttft_s: float, status: int = 200) -> Answer:
    num_tokens = 2 if status == 200 else 0
    return Answer(ARRIVAL, sent_at, 0.0, status, ttft_s, ttft_s + 0.1, num_tokens, NUM_TOKENS // 4)


def found(variant: str, num_users: int, success: float, accepted_per_s: float = 1.0) -> Point:
    return Point(variant, num_users, success, accepted_per_s, 0.0, 50.0, 1.0, 2.0, 3.0, 100)


def test_each_prompt_shares_one_of_the_prefixes_and_no_more() -> None:
    prompts = Prompts(1)
    asked = [prompts() for _ in range(300)]
    assert all(len(a.blocks) == NUM_TOKENS // BLOCK_SIZE for a in asked)
    times = Counter(name for a in asked for name in a.blocks)
    shared = [sum(times[name] > 1 for name in a.blocks) * BLOCK_SIZE for a in asked]
    assert set(shared) == set(PREFIX_TOKENS)
    assert len({a.blocks[0] for a in asked}) == len(PREFIX_TOKENS)


def test_a_point_counts_what_was_sent_within_its_window() -> None:
    answers = [
        answer(0.5, 9.0),  # sent in the first tenth, which does not count
        answer(2.0, 0.5),
        answer(3.0, 0.6),
        answer(4.0, 0.1, status=429),
        answer(8.0, 0.4),
        answer(9.5, 9.0),  # sent in the last tenth, which does not count
    ]
    got = point("x", 7, answers, slo_s=0.5, duration_s=10.0)
    assert (got.num_users, got.num_requests) == (7, 4)
    assert got.success_percent == 50
    assert got.refused_percent == 25
    assert got.hit_percent == 25
    assert got.accepted_per_s == pytest.approx(3 / 8)
    assert got.ttft_ms_p50 == 500


def test_a_point_of_a_run_without_answers_is_all_zero() -> None:
    got = point("x", 1, [], slo_s=0.5, duration_s=10.0)
    assert (got.success_percent, got.accepted_per_s, got.ttft_ms_p99) == (0, 0, 0)


@pytest.mark.parametrize(
    ("ours", "queues", "share", "num_missed"),
    [(99.0, 69.9, 0.91, 0), (98.9, 69.9, 1.0, 1), (99.5, 70.0, 1.0, 1), (98.0, 75.0, 0.85, 3)],
)
def test_the_report_says_of_each_bar_whether_it_is_met(
    ours: float, queues: float, share: float, num_missed: int
) -> None:
    """The required values apply to the run with the most users."""
    text = bars(
        [
            found(ON_DEMAND.name, 24, 10.0),
            found(ON_DEMAND.name, 96, ours, share * CAPACITY_PER_S),
            found(QUEUES.name, 24, 100.0),
            found(QUEUES.name, 96, queues),
        ]
    )
    assert text.startswith("At 96 users:")
    assert text.count("**not met**") == num_missed
    assert text.count(": met") == 3 - num_missed
