"""Tests which pulls may begin. For each source, the number and the bytes of running pulls are
bounded.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.kv.transfer.pull_queue import PullQueue


def add(queue: PullQueue[str], key: str, num_bytes: int = 1, source: str = "p") -> list[str]:
    return queue.add(key, num_bytes, source, math.inf)


@pytest.mark.req("S52", "S53")
def test_the_end_of_a_pull_lets_the_oldest_waiting_one_begin() -> None:
    queue: PullQueue[str] = PullQueue(max_active=2)
    assert add(queue, "a") == ["a"]
    assert add(queue, "b") == ["b"]
    assert add(queue, "c") == []
    assert add(queue, "d") == []
    assert queue.end("d") == [], "it was given up while it waited"
    assert queue.end("a") == ["c"]
    assert queue.end("b") == []
    assert queue.end("c") == []
    queue.check_invariants()


@pytest.mark.req("S52")
def test_few_long_pulls_or_many_short_ones_run_at_a_time() -> None:
    queue: PullQueue[str] = PullQueue(max_active=8, max_bytes=100)
    assert add(queue, "long", 300) == ["long"], "it exceeds max_bytes, so it runs alone"
    assert add(queue, "short", 10) == []
    assert add(queue, "half", 60) == []
    assert add(queue, "other half", 60) == []
    assert queue.end("long") == ["short", "half"]
    assert queue.end("short") == []
    assert queue.end("half") == ["other half"]


@pytest.mark.fault("F23", "F24")
def test_pulls_that_wait_for_one_source_delay_no_others() -> None:
    """Pulls from another source begin at once, however many pulls from a slow source run or
    wait.
    """
    queue: PullQueue[str] = PullQueue(max_active=4, max_bytes=100)
    assert add(queue, "slow", 300, "slow") == ["slow"]
    for n in range(5):
        assert add(queue, f"slow {n}", 60, "slow") == []
    assert add(queue, "a", 50, "good") == ["a"]
    assert add(queue, "b", 50, "good") == ["b"]
    assert add(queue, "c", 50, "good") == [], "its own bytes are bounded too"
    assert queue.end("a") == ["c"]
    assert queue.end("slow") == ["slow 0"]


@pytest.mark.fault("F23")
def test_a_silent_pull_gives_its_place_to_the_next_and_may_end_later() -> None:
    queue: PullQueue[str] = PullQueue(max_active=8, max_bytes=100)
    assert add(queue, "silent", 300) == ["silent"]
    assert add(queue, "next", 300) == []
    assert queue.fell_silent("next") == [], "it has no turn to give up"
    assert queue.is_waiting("next")
    assert queue.fell_silent("silent") == ["next"]
    assert queue.fell_silent("silent") == queue.end("silent") == []
    queue.check_invariants()


def test_long_waits_are_reported_but_running_work_is_not() -> None:
    queue: PullQueue[str] = PullQueue(max_active=1)
    assert queue.add("a", 1, "p", 5.0) == ["a"]
    assert queue.add("b", 1, "p", 5.0) == []
    assert queue.add("c", 1, "p", 6.0) == []
    assert queue.drop_overdue(4.9) == ([], [])
    assert queue.drop_overdue(5.0) == (["b"], [])
    assert queue.end("b") == []
    assert queue.end("a") == ["c"]
    assert queue.drop_overdue(9.0) == ([], [])


def test_overdue_pulls_are_all_dropped_before_another_begins() -> None:
    queue: PullQueue[str] = PullQueue(max_active=8, max_bytes=100)
    assert queue.add("a", 60, "p", 9.0) == ["a"]
    for key, num_bytes, until in (("long", 60, 5.0), ("short", 10, 5.0), ("later", 10, 9.0)):
        assert queue.add(key, num_bytes, "p", until) == []
    assert queue.drop_overdue(5.0) == (["long", "short"], ["later"])
    queue.check_invariants()


@dataclass
class _Watched:
    """A queue, and which of the added pulls have begun and ended."""

    queue: PullQueue[int] = field(default_factory=lambda: PullQueue(max_active=3, max_bytes=100))
    added: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    begun: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    source_of: dict[int, str] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    def note(self, keys: list[int]) -> None:
        for key in keys:
            self.begun[self.source_of[key]].append(key)
        self.queue.check_invariants()

    @property
    def active(self) -> list[int]:
        return [k for keys in self.begun.values() for k in keys if k not in self.ended]


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 60), st.sampled_from("aab")), max_size=60)
)
def test_every_pull_begins_once_and_in_the_order_of_its_source(
    steps: list[tuple[int, int, str]],
) -> None:
    """A silent source delays only its own pulls."""
    watched = _Watched()
    queue = watched.queue
    for number, (choice, num_bytes, source) in enumerate(steps):
        if choice < 5 or not watched.active:
            watched.source_of[number] = source
            watched.added[source].append(number)
            had_any = any(watched.source_of[k] == source for k in watched.active)
            begun = queue.add(number, num_bytes, source, math.inf)
            watched.note(begun)
            assert had_any or number in begun, "no other pull from its source was active"
        else:
            key = watched.active[choice % len(watched.active)]
            if choice < 7:
                watched.ended.add(key)
                watched.note(queue.end(key))
            else:
                watched.note(queue.fell_silent(key))
    while watched.active:
        key = watched.active[0]
        watched.ended.add(key)
        watched.note(queue.end(key))
    assert watched.begun == watched.added or not steps
    assert queue.num_waiting == 0
