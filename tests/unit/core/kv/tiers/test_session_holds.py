"""Which blocks paused sessions hold, and for how long."""

from __future__ import annotations

import pytest

from pdmesh.core.kv.tiers.session_holds import Holds

A, B, C, D, E, F = (bytes([n]) * 16 for n in range(6))
is_stored = {A, B, C, D}.__contains__


@pytest.fixture
def holds() -> Holds:
    return Holds(most=5, most_of_owner=3)


def test_a_block_is_held_until_the_last_session_that_holds_it_goes_on(holds: Holds) -> None:
    assert holds.add("s", b"x", [A, B], until=10.0, is_stored=is_stored) == [A, B]
    assert holds.add("t", b"y", [A], until=20.0, is_stored=is_stored) == []
    assert holds.remove("s") == [B]
    assert A in holds
    assert holds.remove("t") == [A]
    assert len(holds) == 0
    holds.check_invariants()


def test_a_hold_ends_with_its_time(holds: Holds) -> None:
    holds.add("s", b"x", [A, B], until=10.0, is_stored=is_stored)
    holds.add("t", b"y", [A], until=20.0, is_stored=is_stored)
    assert holds.expire(9.9) == []
    assert holds.expire(10.0) == [B]
    assert holds.expire(20.0) == [A]
    holds.check_invariants()


@pytest.mark.req("S96")
def test_an_owner_and_all_together_hold_only_so_many_blocks_the_head_first(holds: Holds) -> None:
    assert holds.add("s", b"x", [A, B, C, D], until=10.0, is_stored=is_stored) == [A, B, C]
    assert holds.add("t", b"x", [D], until=10.0, is_stored=is_stored) == []
    holds.add("u", b"y", [A, B, C], until=10.0, is_stored=is_stored)
    assert len(holds) == 5
    holds.check_invariants()


def test_a_block_that_is_gone_is_held_by_none(holds: Holds) -> None:
    holds.add("s", b"x", [A, A], until=10.0, is_stored=is_stored)
    holds.drop(A)
    holds.drop(B)
    assert len(holds) == 0
    holds.check_invariants()


@pytest.mark.req("S96")
def test_blocks_that_are_not_in_the_pool_take_no_room_from_those_that_are(holds: Holds) -> None:
    far = [bytes([n]) * 16 for n in range(100, 200)]
    assert holds.add("s", b"x", far, until=10.0, is_stored=is_stored) == []
    assert len(holds) == 0
    assert far[0] not in holds
    assert holds.add("t", b"x", [*far, A, B], until=10.0, is_stored=is_stored) == [A, B]
    assert holds.add("u", b"y", [C, D], until=10.0, is_stored=is_stored) == [C, D]
    holds.check_invariants()


def test_a_block_that_a_session_awaits_is_held_from_when_it_is_stored(holds: Holds) -> None:
    holds.add("s", b"x", [E, A, F], until=10.0, is_stored=is_stored)
    holds.arrive(E)
    holds.arrive(F)
    assert len(holds) == 3
    holds.check_invariants()
    assert holds.remove("s") == [F, E, A]
    holds.arrive(E)
    assert len(holds) == 0
    holds.check_invariants()


def test_a_block_that_comes_when_there_is_no_room_is_not_held(holds: Holds) -> None:
    holds.add("s", b"x", [E], until=10.0, is_stored=is_stored)
    holds.add("t", b"x", [A, B, C], until=20.0, is_stored=is_stored)
    holds.arrive(E)
    assert E not in holds
    holds.check_invariants()
    assert holds.expire(10.0) == []
    assert holds.expire(20.0) == [C, B, A]


def test_a_session_that_pauses_again_holds_until_its_new_time(holds: Holds) -> None:
    for until in range(10, 500):
        holds.remove("s")
        holds.add("s", b"x", [A], until=float(until), is_stored=is_stored)
        holds.check_invariants()
    assert holds.expire(498.0) == []
    assert holds.expire(499.0) == [A]
    holds.check_invariants()
