"""Tests which counters make an instance suspect, and when they are ignored (S34)."""

from __future__ import annotations

import pytest

from pdmesh.core.health.fault_judge import Signal
from pdmesh.core.health.outlier_detection import (
    LEGS_FAIL,
    PULLS_SLOW,
    REFUSES_FOREVER,
    OutlierDetector,
    Vitals,
)

pytestmark = pytest.mark.req("S34")


def reasons(signals: tuple[Signal, ...]) -> list[str]:
    assert not any(s.is_proof for s in signals), "counters alone prove nothing"
    return [s.reason for s in signals]


def test_a_single_failure_does_not_count_and_many_are_a_suspicion() -> None:
    book = OutlierDetector()
    book.heard("d0", 1, "g", Vitals(num_accepted=9, num_ended=9, num_failed=1), 1.0)
    assert book.signals("d0", 1.0) == ()
    book.heard("d0", 1, "g", Vitals(num_accepted=19, num_ended=19, num_failed=11), 2.0)
    assert reasons(book.signals("d0", 2.0)) == [LEGS_FAIL]


def test_failures_are_forgotten_with_the_window_and_with_the_incarnation() -> None:
    book = OutlierDetector()
    bad = Vitals(num_accepted=10, num_ended=10, num_failed=10)
    book.heard("d0", 1, "g", bad, 1.0)
    assert reasons(book.signals("d0", 1.0)) == [LEGS_FAIL]
    book.heard("d0", 2, "g", Vitals(), 2.0)
    assert book.signals("d0", 2.0) == ()
    for i in range(40):
        book.heard("d1", 1, "g", bad, float(i))
    assert book.signals("d1", 40.0) == ()
    assert book.signals("d9", 0.0) == ()


def test_an_instance_that_is_full_forever_is_suspect_and_a_busy_one_is_not() -> None:
    book = OutlierDetector()
    for i in range(40):
        stuck = Vitals(num_accepted=8, num_refused=8 + i, num_ended=0, num_slots_used=8)
        book.heard("stuck", 1, "g", stuck, float(i))
        busy = Vitals(num_accepted=8 + i, num_refused=8 + i, num_ended=i, num_slots_used=8)
        book.heard("busy", 1, "g", busy, float(i))
        idle = Vitals(num_accepted=8, num_refused=8 + i, num_ended=8, num_slots_used=0)
        book.heard("drained", 1, "g", idle, float(i))
        slow = Vitals(num_accepted=8, num_refused=8 + i, num_slots_used=8, num_tokens=40 * i)
        book.heard("slow", 1, "g", slow, float(i))
    assert reasons(book.signals("stuck", 40.0)) == [REFUSES_FOREVER]
    assert book.signals("busy", 40.0) == ()
    assert book.signals("drained", 40.0) == ()
    assert book.signals("slow", 40.0) == (), "eight long prompts take it longer than a window"


def test_a_pull_is_slow_only_in_comparison_with_pulls_of_peers() -> None:
    book = OutlierDetector()
    for i in range(3):
        book.heard(f"d{i}", 1, "g", Vitals(num_pulls=10, pull_s=0.2), 1.0)
    book.heard("d3", 1, "g", Vitals(num_pulls=10, pull_s=4.0), 1.0)
    book.heard("far", 1, "other", Vitals(num_pulls=10, pull_s=4.0), 1.0)
    assert reasons(book.signals("d3", 1.0)) == [PULLS_SLOW]
    assert book.signals("d0", 1.0) == ()
    assert book.signals("far", 1.0) == ()
    book.forget("d0")
    book.forget("d1")
    assert book.signals("d3", 1.0) == (), "too few peers to say what is usual"
