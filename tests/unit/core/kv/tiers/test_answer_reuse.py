"""The chance that a chat continues, learned from prompts that begin with an earlier answer."""

from __future__ import annotations

import random

from pdmesh.core.kv.tiers.answer_reuse import HORIZON_S, MAX_SCOPES, AnswerReuse


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_the_chance_becomes_the_share_of_chats_that_went_on() -> None:
    rng, known = random.Random(1), AnswerReuse()
    for number in range(4000):
        known.answered("long", name(2 * number), float(number))
        known.answered("short", name(2 * number + 1), float(number))
        if rng.random() < 0.8:
            known.prompted([name(10**9), name(2 * number), name(10**9 + 1)])
    assert 0.6 < known.chance("long") < 0.95
    assert known.chance("short") < 0.01


def test_a_chat_is_given_up_after_the_horizon_and_not_before() -> None:
    known = AnswerReuse()
    first = known.chance("chat")
    known.answered("chat", name(1), 0.0)
    known.answered("chat", name(2), HORIZON_S - 1)
    assert (known.chance("chat"), len(known)) == (first, 2)
    known.answered("chat", name(3), HORIZON_S)
    assert known.chance("chat") < first
    assert len(known) == 2


def test_when_many_answers_are_undecided_the_chance_is_no_other() -> None:
    """There are 100 answers a second, and each chat continues after a minute. With `max_answers=8`,
    only few of them are followed.
    """
    known = AnswerReuse(max_answers=8)
    for number in range(50_000):
        known.answered("chat", name(number), number / 100)
        if number >= 6000:
            known.prompted([name(number - 6000)])
    assert known.chance("chat") > 0.9


def test_an_answer_counts_once() -> None:
    known = AnswerReuse()
    before = known.chance("chat")
    known.answered("chat", name(1), 0.0)
    known.answered("chat", name(1), 0.0)
    assert len(known) == 1
    known.prompted([name(1)])
    once = known.chance("chat")
    assert once > before
    known.prompted([name(1)])
    assert (known.chance("chat"), len(known)) == (once, 0)


def test_what_is_known_is_bounded() -> None:
    known = AnswerReuse(max_answers=4)
    for number in range(3 * MAX_SCOPES):
        known.answered(f"scope {number}", name(number), number * HORIZON_S)
    assert len(known) <= 4
    assert len(known._chances) == MAX_SCOPES
    assert known.chance("scope 0") == known.chance("never seen"), "it is forgotten"
