"""Which blocks paused sessions hold, and for how long."""

from __future__ import annotations

import pytest

from pdmesh.core.kv.tiers.holds import Holds

A, B, C, D = (bytes([n]) * 16 for n in range(4))


@pytest.fixture
def holds() -> Holds:
    return Holds(most=5, most_of_owner=3)


def test_a_block_is_held_until_the_last_session_that_holds_it_goes_on(holds: Holds) -> None:
    assert holds.add("s", b"x", [A, B], until=10.0) == [A, B]
    assert holds.add("t", b"y", [A], until=20.0) == []
    assert holds.remove("s") == [B]
    assert A in holds
    assert holds.remove("t") == [A]
    assert len(holds) == 0
    holds.check_invariants()


def test_a_hold_ends_with_its_time(holds: Holds) -> None:
    holds.add("s", b"x", [A, B], until=10.0)
    holds.add("t", b"y", [A], until=20.0)
    assert holds.expire(9.9) == []
    assert holds.expire(10.0) == [B]
    assert holds.expire(20.0) == [A]
    holds.check_invariants()


@pytest.mark.req("S96")
def test_an_owner_and_all_together_hold_only_so_many_blocks_the_head_first(holds: Holds) -> None:
    assert holds.add("s", b"x", [A, B, C, D], until=10.0) == [A, B, C]
    assert holds.add("t", b"x", [D], until=10.0) == []
    holds.add("u", b"y", [A, B, C], until=10.0)
    assert len(holds) == 5
    holds.check_invariants()


def test_a_block_that_is_gone_is_held_by_none(holds: Holds) -> None:
    holds.add("s", b"x", [A, A], until=10.0)
    holds.drop(A)
    holds.drop(B)
    assert len(holds) == 0
    holds.check_invariants()
