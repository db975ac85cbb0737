"""Requests are served by priority and arrival, and no request waits for ever (S83)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.instance.urgency import CLASS_S, Urgency, has_several_classes

URGENCIES = st.builds(Urgency, st.integers(0, 5), st.integers(0, 100).map(float))


@pytest.mark.req("S83")
@given(st.lists(URGENCIES, max_size=30))
def test_a_request_is_passed_only_by_more_urgent_ones_that_came_soon_after_it(
    requests: list[Urgency],
) -> None:
    order = sorted(requests, key=lambda request: request.turn_at)
    for place, late in enumerate(order):
        for early in order[:place]:
            if early.arrived_at > late.arrived_at:
                assert early.priority < late.priority
                classes = late.priority - early.priority
                assert early.arrived_at - late.arrived_at <= classes * CLASS_S


@pytest.mark.req("S83")
@given(st.lists(st.integers(0, 100).map(float), max_size=30), st.integers(0, 5))
def test_requests_of_one_priority_are_served_in_order_of_arrival(
    arrivals: list[float], priority: int
) -> None:
    requests = [Urgency(priority, at) for at in arrivals]
    assert not has_several_classes(request.priority for request in requests)
    order = sorted(requests, key=lambda request: request.turn_at)
    assert [request.arrived_at for request in order] == sorted(arrivals)
    assert not any(a.stands_back_for(b) for a in requests for b in requests)


@pytest.mark.req("S83")
@given(URGENCIES, URGENCIES)
def test_of_two_requests_at_most_one_stands_back_and_only_for_an_earlier_turn(
    a: Urgency, b: Urgency
) -> None:
    assert not (a.stands_back_for(b) and b.stands_back_for(a))
    if a.stands_back_for(b):
        assert b.turn_at < a.turn_at


@pytest.mark.req("S83")
def test_what_has_waited_for_its_class_stands_back_no_longer() -> None:
    batch = Urgency(1, 100.0)
    assert batch.stands_back_for(Urgency(0, 100.0 + 0.9 * CLASS_S))
    assert not batch.stands_back_for(Urgency(0, 100.0 + 1.1 * CLASS_S))
    assert not batch.stands_back_for(Urgency(1, 90.0)), "it has begun, and is as urgent"
