"""Holds keep the blocks of paused chat sessions on their instances for a limited time."""

from __future__ import annotations

import pytest

from pdmesh.core.kv.tiers.session_holds import (
    MAX_SESSION_NAMES,
    MAX_TOLD,
    Holds,
    PausedSessions,
    SessionState,
    held_blocks,
)

A, B, C, D, E, F = (bytes([n]) * 16 for n in range(6))
PAUSED, RESUMED, DONE = SessionState.PAUSED_FOR_TOOL, SessionState.RESUMED, SessionState.DONE
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


@pytest.mark.req("S108")
@pytest.mark.parametrize("end", [RESUMED, DONE])
def test_instances_of_the_pause_that_did_not_serve_the_next_turn_are_told_once(
    end: SessionState,
) -> None:
    paused = PausedSessions(60.0)
    assert list(paused.ended("s", PAUSED, ["a", "d"], 0.0)) == []
    assert list(paused.ended("other", end, ["a"], 1.0)) == []
    assert list(paused.ended("s", end, ["b", "d"], 2.0)) == ["a"]
    assert list(paused.ended("s", end, ["b"], 3.0)) == []


def test_a_pause_that_no_instance_is_told_of_changes_nothing() -> None:
    paused = PausedSessions(60.0)
    paused.ended("s", PAUSED, ["a"], 0.0)
    paused.ended("s", PAUSED, [], 1.0)
    assert list(paused.ended("s", DONE, [], 2.0)) == ["a"]


def test_the_last_instances_of_all_pauses_of_a_session_are_remembered() -> None:
    paused = PausedSessions(60.0)
    paused.ended("s", PAUSED, ["a"], 0.0)
    paused.ended("s", PAUSED, [f"i{n}" for n in range(40)], 1.0)
    assert list(paused.ended("s", DONE, [], 2.0)) == [f"i{n}" for n in range(40 - MAX_TOLD, 40)]


def test_pauses_are_forgotten_with_their_time_and_beyond_the_bound() -> None:
    paused = PausedSessions(60.0, max_paused=2)
    paused.ended("s", PAUSED, ["a"], 0.0)
    assert list(paused.ended("s", DONE, [], 60.0)) == []
    for session in ("s", "t", "u"):
        paused.ended(session, PAUSED, ["a"], 60.0)
    assert list(paused.ended("s", DONE, [], 61.0)) == []
    assert list(paused.ended("t", DONE, [], 61.0)) == ["a"]
    paused.ended("v", PAUSED, ["a"], 120.0)
    assert len(paused) == 1


@pytest.mark.req("S108")
def test_the_answer_is_held_only_if_there_is_one_choice() -> None:
    assert held_blocks([[A, B]], 1, lambda: [C]) == [A, B, C]
    assert held_blocks([[A, B], [A, C]], 2, lambda: pytest.fail("not asked")) == [A, B, C]
    many = [n.to_bytes(4, "big") for n in range(MAX_SESSION_NAMES + 1)]
    assert held_blocks([many], 1, lambda: [C]) == many[:-1], "the head of the prompt"
