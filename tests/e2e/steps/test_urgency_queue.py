"""vLLM's waiting requests leave the queue by turn, even if some are skipped and put back (S83).

A request's turn is its arrival plus a time for its priority.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.core.instance.urgency import CLASS_S, Urgency

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]  # vLLM emits warnings


def new_queue() -> Any:
    """vLLM is imported within the test, because there its warnings are no errors."""
    from pdmesh.engine.vllm.connector.scheduler.urgency_queue import UrgencyQueue

    return UrgencyQueue()


def turn_at(request: Any) -> float:
    return Urgency(request.priority, request.arrival_time).turn_at


def request(priority: int, arrival_time: float) -> Any:
    """A request with the fields that the queue reads."""
    return SimpleNamespace(priority=priority, arrival_time=arrival_time)


REQUESTS = st.lists(
    st.builds(request, st.integers(0, 3), st.integers(0, 20).map(float)), max_size=20
)


@pytest.mark.req("S83")
@settings(deadline=None)  # the first import takes long
@given(REQUESTS, st.data())
def test_requests_leave_by_turn_although_some_are_put_back_or_removed(
    requests: list[Any], data: st.DataObject
) -> None:
    queue = new_queue()
    for each in requests:
        queue.add_request(each)
    skipped = [queue.pop_request() for _ in range(data.draw(st.integers(0, len(requests))))]
    queue.prepend_requests(skipped)
    gone = [each for each in requests if data.draw(st.booleans())]
    queue.remove_requests(gone)
    left = [each for each in requests if not any(each is one for one in gone)]
    turns = sorted(turn_at(each) for each in left)
    assert len(queue) == len(left)
    assert bool(queue) == bool(left)
    assert [turn_at(each) for each in queue] == turns
    assert not left or queue.peek_request() is next(iter(queue))
    assert [turn_at(queue.pop_request()) for _ in left] == turns


@pytest.mark.req("S83")
def test_requests_of_one_turn_leave_in_the_order_in_which_they_came() -> None:
    queue = new_queue()
    same = [request(1, 0.0), request(0, CLASS_S), request(1, 0.0)]
    for each in same:
        queue.add_request(each)
    assert all(queue.pop_request() is each for each in same)
    with pytest.raises(IndexError):
        queue.pop_request()
    with pytest.raises(IndexError):
        queue.peek_request()
