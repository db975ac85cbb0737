"""The order in which instances are asked for snapshots of their cached blocks."""

from __future__ import annotations

import pytest

from pdmesh.core.kv.prefix.snapshot_order import IndexFirst, Repairs


@pytest.mark.fault("F20")
def test_instances_that_do_not_answer_delay_the_others_only_by_their_own_turns() -> None:
    """Four unreachable instances once took all the places for requests. So the gap of the fifth
    instance was never filled.
    """
    repairs, now = Repairs(), 0.0
    for name in ("dead-0", "dead-1", "dead-2", "dead-3", "well"):
        repairs.want(name, now)
    asked: list[str] = []
    while "well" not in asked:
        now = repairs.next_start() or now
        started = repairs.start(now)
        assert started, "no instance is asked, although one waits"
        asked += started
        now += 5.0  # the timeout of a fetch
        for name in started:
            repairs.ended(name, name == "well", now)
        repairs.check_invariants()
    assert now <= 11.0
    assert "well" not in dict(repairs.since())


def test_a_pause_doubles_up_to_its_bound() -> None:
    repairs, now = Repairs(), 0.0
    repairs.want("p0", now)
    pauses = []
    for _ in range(6):
        due = repairs.next_start()
        assert due is not None
        pauses.append(round(due - now, 3))
        now = due
        assert repairs.start(now) == ["p0"]
        assert repairs.next_start() is None
        repairs.ended("p0", False, now)
    assert pauses == [0.05, 0.2, 0.4, 0.8, 1.6, 2.0]


def test_a_change_during_a_request_is_requested_again() -> None:
    """The snapshot that is being fetched may be older than the gap."""
    repairs = Repairs()
    repairs.want("p0", 0.0)
    assert repairs.start(1.0) == ["p0"]
    repairs.want("p0", 1.1)
    assert repairs.start(1.2) == []
    repairs.ended("p0", True, 1.3)
    assert repairs.start(2.0) == ["p0"]
    repairs.ended("p0", True, 2.1)
    assert len(repairs) == 0


def test_the_instance_is_asked_when_the_index_was_asked_just_before() -> None:
    turns = IndexFirst()
    assert turns.asks_index("prefill-0", 0.0)
    assert not turns.asks_index("prefill-0", 1.9)
    assert turns.asks_index("prefill-1", 1.9)
    assert turns.asks_index("prefill-0", 2.0), "the index's answer lasted"
    assert not turns.asks_index("prefill-0", 2.1)
