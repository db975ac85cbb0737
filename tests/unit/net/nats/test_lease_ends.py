"""A reader asks the server for each entry that was not renewed for the length of a lease."""

from __future__ import annotations

from itertools import pairwise

from pdmesh.net.nats.lease_ends import LeaseEnds


def test_an_entry_is_due_a_lease_after_its_last_renewal_and_then_after_longer_pauses() -> None:
    ends = LeaseEnds(lease_s=3.0, retry_s=0.5)
    ends.renewed("a", 1, now=0.0)
    ends.renewed("b", 2, now=1.0)
    ends.renewed("a", 3, now=2.0)
    assert ends.due(3.9) == {}
    assert ends.due(4.0) == {"b": 2}
    assert ends.due(4.4) == {}
    assert ends.due(4.5) == {"b": 2}
    assert ends.due(5.0) == {"a": 3}
    assert ends.due(5.5) == {"a": 3, "b": 2}
    dues = [second for second in range(60, 100) if "b" in ends.due(float(second))]
    assert {later - earlier for earlier, later in pairwise(dues)} == {3}  # the length of a lease
    ends.renewed("b", 9, now=100.0)
    assert [at for at in (103.0, 103.4, 103.5) if "b" in ends.due(at)] == [103.0, 103.5]


def test_a_renewal_puts_off_and_what_has_ended_is_never_due() -> None:
    ends = LeaseEnds(lease_s=3.0, retry_s=0.5)
    ends.renewed("a", 1, now=0.0)
    ends.renewed("b", 2, now=0.0)
    assert ends.due(3.0) == {"a": 1, "b": 2}
    ends.renewed("a", 4, now=3.1)
    ends.ended("b")
    ends.ended("unknown")
    assert ends.due(6.0) == {}
    assert ends.due(6.1) == {"a": 4}
    ends.clear()
    assert ends.due(60.0) == {}


def test_an_answer_counts_only_if_nothing_came_of_the_key_since_it_was_asked_for() -> None:
    ends = LeaseEnds(lease_s=3.0, retry_s=0.5)
    ends.renewed("a", 1, now=0.0)
    assert ends.is_last("a", 1)
    ends.renewed("a", 2, now=1.0)
    assert not ends.is_last("a", 1)
    ends.ended("a")
    assert not ends.is_last("a", 2)
