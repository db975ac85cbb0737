"""The times of an engine's steps. Synchronous steps leave gaps, and asynchronous steps overlap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.instance.step_times import ComputedStep, StepTimes

T1, T2, T3 = 1.0, 10.0, 2.0  # the times to schedule, compute and process a step


def synchronous(num_steps: int) -> StepTimes:
    """Times of steps that are scheduled, computed and processed one after another."""
    times, now = StepTimes(), 0.0
    for n in range(num_steps):
        times.scheduled(now, now + T1, is_steady=n > 0)
        computed = ComputedStep(now + T1, now + T1 + T2, T2)
        times.processed(now + T1 + T2, now + T1 + T2 + T3)
        times.computed(computed)
        now += T1 + T2 + T3
    return times


def asynchronous(num_steps: int) -> StepTimes:
    """Step n is computed from n * T2 on. Meanwhile, step n - 1 is processed, and then step n + 1 is
    scheduled.
    """
    times = StepTimes()
    times.scheduled(-T1, 0.0, is_steady=False)
    for n in range(num_steps):
        now = n * T2
        if n:
            times.processed(now, now + T3)
            times.computed(ComputedStep(now - T2, now, T2))
        if n + 1 < num_steps:
            times.scheduled(now + T3, now + T3 + T1, is_steady=True)
    return times


@pytest.mark.req("S139", "S146")
def test_a_synchronous_steps_gap_is_its_schedule_and_the_processing_of_the_step_before() -> None:
    totals = synchronous(5).totals
    assert (totals.num_steps, totals.num_steady, totals.num_overlapped) == (5, 4, 0)
    assert totals.gap_s == pytest.approx(4 * (T1 + T3))
    assert (totals.schedule_s, totals.compute_s, totals.process_s) == (5 * T1, 5 * T2, 5 * T3)
    assert totals.most_ahead == 0


@pytest.mark.req("S140")
def test_asynchronous_steps_are_scheduled_within_the_step_before_and_leave_no_gap() -> None:
    totals = asynchronous(10).totals
    assert totals.num_steady == totals.num_overlapped > 5
    assert (totals.gap_s, totals.most_ahead) == (0.0, 1)


def test_a_step_that_is_scheduled_too_late_does_not_overlap() -> None:
    times = StepTimes()
    times.scheduled(0, 1, is_steady=False)
    times.scheduled(8, 12, is_steady=True)  # the first step is computed from 1 to 11
    times.computed(ComputedStep(1, 11, 10))
    times.computed(ComputedStep(12, 20, 8))
    assert (times.totals.num_steady, times.totals.num_overlapped) == (1, 0)
    assert times.totals.gap_s == 1


def test_waiting_for_requests_is_no_gap() -> None:
    times = StepTimes()
    for begin in (0, 100):
        times.scheduled(begin, begin + 1, is_steady=False)
        times.processed(begin + 5, begin + 6)
        times.computed(ComputedStep(begin + 1, begin + 5, 4))
    assert times.totals.gap_s == 0


@given(st.integers(1, 300))
def test_a_rank_that_tells_nothing_costs_bounded_memory(num_steps: int) -> None:
    times = StepTimes()
    for n in range(num_steps):
        times.scheduled(n, n, is_steady=True)
        times.processed(n, n)
    assert len(times._pending) <= 64


def test_a_step_is_not_processed_twice() -> None:
    times = StepTimes()
    times.scheduled(0, 1, is_steady=False)
    times.processed(2, 3)
    with pytest.raises(AssertionError):
        times.processed(3, 4)
