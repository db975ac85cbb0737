"""Which pulls begin at once: by number, and by bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.pull_queue import PullQueue


@pytest.mark.req("S52", "S53")
def test_one_that_ends_lets_the_oldest_begin() -> None:
    queue: PullQueue[str] = PullQueue(max_active=2)
    assert queue.add("a", 1) == ["a"]
    assert queue.add("b", 1) == ["b"]
    assert queue.add("c", 1) == []
    assert queue.add("d", 1) == []
    assert queue.end("d") == [], "given up while it waited"
    assert queue.end("a") == ["c"]
    assert queue.end("b") == []
    assert queue.end("c") == []
    queue.check_invariants()


@pytest.mark.req("S52")
def test_long_ones_go_few_at_a_time_and_short_ones_together() -> None:
    queue: PullQueue[str] = PullQueue(max_active=8, max_bytes=100)
    assert queue.add("long", 300) == ["long"], "too long for any company"
    assert queue.add("short", 10) == []
    assert queue.add("half", 60) == []
    assert queue.add("other half", 60) == []
    assert queue.end("long") == ["short", "half"]
    assert queue.end("short") == []
    assert queue.end("half") == ["other half"]


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 60)), max_size=60))
def test_every_pull_begins_once_and_in_order(steps: list[tuple[int, int]]) -> None:
    queue: PullQueue[int] = PullQueue(max_active=3, max_bytes=100)
    added: list[int] = []
    begun: list[int] = []
    ended: set[int] = set()

    def end(key: int) -> None:
        ended.add(key)
        begun.extend(queue.end(key))

    for number, (choice, num_bytes) in enumerate(steps):
        active = [key for key in begun if key not in ended]
        if choice < 5 or not active:
            added.append(number)
            begun += queue.add(number, num_bytes)
        else:
            end(active[choice % len(active)])
        queue.check_invariants()
    while active := [key for key in begun if key not in ended]:
        end(active[0])
        queue.check_invariants()
    assert begun == added
