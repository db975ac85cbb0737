"""Which instances hear of a session's pause and of its end, and which blocks they protect."""

from __future__ import annotations

import pytest

from pdmesh.core.kv.tiers.protected_kv import MAX_TOLD, PausedSessions, protected_blocks
from pdmesh.core.kv.tiers.session_holds import MAX_SESSION_NAMES, SessionState

PAUSED, RESUMED, DONE = SessionState.PAUSED_FOR_TOOL, SessionState.RESUMED, SessionState.DONE
A, B, C = b"a", b"b", b"c"


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
def test_the_answer_is_protected_only_if_there_is_one_choice() -> None:
    assert protected_blocks([[A, B]], 1, lambda: [C]) == [A, B, C]
    assert protected_blocks([[A, B], [A, C]], 2, lambda: pytest.fail("not asked")) == [A, B, C]
    many = [n.to_bytes(4, "big") for n in range(MAX_SESSION_NAMES + 1)]
    assert protected_blocks([many], 1, lambda: [C]) == many[:-1], "the head of the prompt"
