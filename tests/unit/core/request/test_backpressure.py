"""Gateways report their queue lengths to the master, which sends back the total per scenario.

A gateway refuses a new request at once if the total makes its deadline unreachable.
"""

from __future__ import annotations

import math

import pytest

from pdmesh.core.request.backpressure import (
    MAX_AGE_S,
    MAX_SCENARIOS,
    QUEUE_FULL,
    TTFT_UNREACHABLE,
    Backpressure,
    Pressure,
    PressureView,
    QueueBook,
    QueueRefusal,
)

pytestmark = pytest.mark.req("S97")


def heard(told: dict[int, int], **pressure: object) -> PressureView:
    view = PressureView()
    values: dict[str, object] = {"waiting": {1: 30}, "max_waiting": 0, "prefills_per_s": 10.0}
    view.hear(Pressure("chat", **(values | pressure)), told, now=0.0)  # type: ignore[arg-type]
    return view


def test_the_master_adds_up_what_each_gateway_said_last() -> None:
    book = QueueBook()
    book.tell("g0", {"chat": {1: 5}}, 0.0)
    book.tell("g1", {"chat": {1: 2, 0: 1}, "batch": {5: 9}}, 0.0)
    assert book.waiting("chat", 0.1) == {0: 1, 1: 7}
    book.tell("g1", {"chat": {1: 3}}, 0.2)
    assert book.waiting("chat", 0.2) == {1: 8}
    assert book.waiting("batch", 0.2) == {}
    assert book.scenarios() == ["chat"]


def test_a_gateway_that_fell_silent_has_no_queue() -> None:
    book = QueueBook()
    book.tell("dead", {"chat": {1: 500}}, 0.0)
    book.tell("g1", {"chat": {1: 2}}, MAX_AGE_S)
    assert book.waiting("chat", MAX_AGE_S + 0.1) == {1: 2}


def test_a_request_that_cannot_be_served_in_time_is_refused_with_a_time_to_retry() -> None:
    view = heard({1: 10})  # 20 requests wait at the other gateways
    assert view.refusal("chat", {1: 10}, 1, ttft_s=3.0, now=0.1) is None
    assert view.refusal("chat", {1: 10}, 1, ttft_s=2.0, now=0.1) == QueueRefusal(
        TTFT_UNREACHABLE, 1.0
    )


def test_a_gateway_counts_its_own_queue_as_it_is_now() -> None:
    view = heard({1: 30})
    assert view.refusal("chat", {1: 30}, 1, ttft_s=2.0, now=0.1) is not None
    assert view.refusal("chat", {1: 20}, 1, ttft_s=2.0, now=0.1) is None
    assert view.refusal("chat", {}, 1, ttft_s=0.01, now=0.1) is None, "no request is ahead of it"


def test_a_queue_at_its_limit_is_full_however_fast_it_moves() -> None:
    view = heard({}, max_waiting=30, prefills_per_s=1000.0)
    refused = view.refusal("chat", {}, 1, ttft_s=60.0, now=0.1)
    assert refused is not None
    assert refused.reason == QUEUE_FULL
    unknown = heard({}, max_waiting=30, prefills_per_s=0.0)
    assert unknown.refusal("chat", {}, 1, ttft_s=60.0, now=0.1) == QueueRefusal(QUEUE_FULL, 1.0)


def test_waiting_requests_with_a_lower_priority_do_not_come_first() -> None:
    view = heard({}, waiting={5: 100, 0: 3})
    assert view.refusal("chat", {}, 5, ttft_s=1.0, now=0.1) is not None
    assert view.refusal("chat", {}, 1, ttft_s=1.0, now=0.1) is None


def test_an_old_unknown_or_foreign_report_refuses_no_request() -> None:
    view = heard({}, waiting={1: 10_000})
    assert view.refusal("other", {}, 1, ttft_s=1.0, now=0.1) is None
    assert view.refusal("chat", {}, 1, ttft_s=1.0, now=MAX_AGE_S + 0.1) is None
    unknown = heard({}, waiting={1: 10_000}, prefills_per_s=0.0)
    assert unknown.refusal("chat", {}, 1, ttft_s=1.0, now=0.1) is None


def test_the_rate_is_looked_up_now_and_then_and_is_zero_if_it_is_unknown() -> None:
    asked: list[str] = []

    def rate(scenario: str, now: float) -> float:
        asked.append(scenario)
        return float("inf") if scenario == "new" else 7.0

    master = Backpressure(rate, max_waiting=9)
    master.book.tell("g0", {"chat": {1: 2}}, 0.0)
    for i in range(10):
        told = master.pressure("chat", 0.001 * i)
    assert (told.waiting, told.max_waiting, told.prefills_per_s) == ({1: 2}, 9, 7.0)
    assert asked == ["chat"]
    assert master.pressure("new", 0.0).prefills_per_s == 0.0


def test_unserved_names_do_not_push_out_the_rates_of_served_scenarios() -> None:
    """Clients choose the names. With 256 unserved names, the master once forgot the known rates."""
    asked: list[str] = []

    def rate(scenario: str, now: float) -> float:
        asked.append(scenario)
        return 7.0 if scenario == "chat" else math.inf

    master = Backpressure(rate)
    master.pressure("chat", 0.0)
    for i in range(2 * MAX_SCENARIOS):
        assert master.pressure(f"made-up-{i}", 0.0).prefills_per_s == 0.0
    assert master.pressure("chat", 0.0).prefills_per_s == 7.0
    assert asked.count("chat") == 1
