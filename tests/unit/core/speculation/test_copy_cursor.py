"""Speculation for an answer that copies a text with edits.

The cursor is the place in the text from which the answer copies. The next tokens there are the
proposal.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.core.speculation.copy_cursor import REPLAYED, CopyCursor
from pdmesh.core.speculation.ngram_index import NgramIndex

LARGE = 1 << 17


def cursor(prompt: Sequence[int], drawn: Sequence[int]) -> CopyCursor:
    return CopyCursor([*prompt, *drawn], len(drawn), LARGE)


class Search:
    """Plain prompt lookup, which searches the whole text in each step. It is the reference."""

    def __init__(self, prompt: Sequence[int], drawn: Sequence[int]) -> None:
        self.index = NgramIndex([*prompt, *drawn], LARGE)

    def extend(self, tokens: Sequence[int]) -> None:
        self.index.extend(tokens)

    def propose(self, num: int) -> list[int]:
        found = self.index.next_after()
        return [] if found is None else self.index.part(found, found + num).tolist()


def num_steps(
    begin: Callable[[Sequence[int], Sequence[int]], Search | CopyCursor],
    prompt: list[int],
    answer: list[int],
    num_proposed: int = 6,
) -> int:
    """The number of steps in which a target draws this answer. The first token comes from the
    prefill.
    """
    proposer, position, steps = begin(prompt, answer[:1]), 1, 0
    while position < len(answer):
        proposed = proposer.propose(num_proposed)
        assert len(proposed) <= num_proposed
        rest, accepted = answer[position:], 0
        while accepted < min(len(proposed), len(rest)) and proposed[accepted] == rest[accepted]:
            accepted += 1
        drawn = rest[: accepted + 1]
        proposer.extend(drawn)
        position += len(drawn)
        steps += 1
    return steps


def code(rng: random.Random, num_lines: int) -> list[list[int]]:
    """Lines of a program. Most of them begin and end alike, as `self.x = x` and `return None`
    do.
    """
    beginnings = [[1, 2, 3], [1, 2, 4, 5], [1, 1, 6, 7]]
    return [
        [*rng.choice(beginnings), rng.randrange(100, 140), 8, rng.randrange(100, 140), 9, 10]
        for _ in range(num_lines)
    ]


def edited(rng: random.Random, lines: list[list[int]]) -> list[int]:
    result: list[int] = []
    for line in lines:
        kind = rng.random()
        if kind < 0.05:
            continue  # delete the line
        if kind < 0.10:
            result += [1, 2, 3, rng.randrange(200, 300), 9, 10]  # insert a line
        place = rng.randrange(3, len(line))
        is_changed = 0.10 < kind < 0.20
        result += (
            [*line[:place], rng.randrange(200, 300), *line[place + 1 :]] if is_changed else line
        )
    return result


@pytest.mark.req("S116")
def test_a_copy_takes_a_fraction_of_the_steps() -> None:
    rng = random.Random(1)
    text = [rng.randrange(50_000) for _ in range(700)]
    steps = num_steps(cursor, text, text[100:600])
    assert steps <= 500 / 7 + 2, "each step draws six proposed tokens and one more"


@pytest.mark.req("S117")
@pytest.mark.parametrize("seed", range(8))
def test_an_edit_of_a_text_with_repeated_lines_takes_fewer_steps_with_the_cursor(seed: int) -> None:
    rng = random.Random(seed)
    lines = code(rng, 150)
    prompt, answer = [token for line in lines for token in line], edited(rng, lines)
    with_cursor, without = (num_steps(begin, prompt, answer) for begin in (cursor, Search))
    assert with_cursor < 0.8 * without
    assert len(answer) / with_cursor > 1.25 * len(answer) / without


@pytest.mark.req("S117")
def test_the_first_proposal_needs_no_match() -> None:
    """One drawn token is too short for an n-gram. Plain lookup proposes nothing then."""
    prompt = [11, 12, 13, 14, 15, 16]
    assert cursor(prompt, [13]).propose(3) == [14, 15, 16], "behind the token's first place"
    assert Search(prompt, [13]).propose(3) == []
    assert cursor(prompt, [99]).propose(3) == [11, 12, 13], "the prompt's first tokens"
    assert cursor(prompt, []).propose(3) == [11, 12, 13]


@pytest.mark.req("S117")
def test_the_cursor_advances_with_what_is_copied_and_is_lost_at_an_edit() -> None:
    prompt = list(range(100, 130))
    proposer = cursor(prompt, [105])
    assert proposer.propose(4) == [106, 107, 108, 109]
    proposer.extend([106, 107, 108, 109, 110])
    assert proposer.propose(4) == [111, 112, 113, 114]
    proposer.extend([111, 7])  # 7 replaces 112, and is nowhere in the prompt
    assert proposer.propose(4) == []
    proposer.extend([113])
    assert proposer.propose(4) == [114, 115, 116, 117], "one token is enough near the edit"


@pytest.mark.req("S117")
def test_of_equal_lines_the_one_near_the_edit_is_taken() -> None:
    """A new search would take the last equal line, which is in another part of the text."""
    same = [1, 2, 3, 4]
    prompt = [50, 51, 52, 53, 54, *same, 60, 61, 62, *range(200, 300), *same, 70, 71]
    drawn = [50, 51, 52, 53, 54, 9]  # 9 is inserted between 54 and the equal line
    proposer, search = cursor(prompt, drawn[:1]), Search(prompt, drawn[:1])
    for each in (proposer, search):
        each.propose(4)
        each.extend([*drawn[1:], *same])
        found = each.propose(2)
        assert found == ([60, 61] if each is proposer else [70, 71])


def test_an_answer_that_repeats_its_own_end_is_proposed_beyond_it() -> None:
    proposer = cursor([1, 2], [5, 6, 7, 5, 6, 7, 5])
    assert proposer.propose(8) == [6, 7, 5, 6, 7, 5, 6, 7]


@pytest.mark.req("S117")
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), num_drawn=st.integers(1, 400), num_proposed=st.integers(0, 8))
def test_a_request_that_was_moved_goes_on_at_its_place(
    seed: int, num_drawn: int, num_proposed: int
) -> None:
    """A migration brings the text without the cursor. The new proposer agrees with the old one as
    soon as the answer copies again.
    """
    rng = random.Random(seed)
    lines = code(rng, 60)
    prompt, answer = [token for line in lines for token in line], edited(rng, lines)
    answer = [*answer[:num_drawn], *prompt[:REPLAYED]]
    stayed = cursor(prompt, answer[:1])
    for token in answer[1:]:
        stayed.propose(1)
        stayed.extend([token])
    moved = cursor(prompt, answer)
    assert len(moved) == len(stayed)
    proposed = moved.propose(num_proposed)
    assert len(proposed) == num_proposed
    if len(answer) <= REPLAYED:
        assert proposed == stayed.propose(num_proposed)


@pytest.mark.req("S116")
@settings(max_examples=60, deadline=None)
@given(
    text=st.lists(st.integers(0, 5), max_size=150),
    num_drawn=st.integers(0, 150),
    later=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=9), max_size=40),
    max_tokens=st.integers(10, 60),
)
def test_any_text_may_be_followed_while_its_beginning_is_forgotten(
    text: list[int], num_drawn: int, later: list[list[int]], max_tokens: int
) -> None:
    proposer = CopyCursor(text, min(num_drawn, len(text)), max_tokens)
    known = set(text)
    for tokens in later:
        proposed = proposer.propose(5)
        assert len(proposed) in (0, 5)
        assert set(proposed) <= known
        proposer.extend(tokens)
        known |= set(tokens)
        assert proposer.propose(0) == []


@pytest.mark.req("S116")
def test_the_work_for_a_token_does_not_grow_with_the_prompt() -> None:
    """The answer copies, is edited often, and copies again."""
    per_token = []
    for length in (1_000, 10_000, 100_000):
        rng = random.Random(length)
        prompt = [token for line in code(rng, length // 8) for token in line]
        proposer = cursor(prompt, prompt[:1])
        proposer.propose(1)
        before, num_drawn = proposer.num_steps, 0
        answer = edited(rng, code(random.Random(length), 120))
        for token in answer:
            proposer.propose(6)
            proposer.extend([token])
            num_drawn += 1
        per_token.append((proposer.num_steps - before) / num_drawn)
    assert per_token[-1] < 2 * per_token[0], per_token
    assert max(per_token) < 20


@pytest.mark.req("S116")
@pytest.mark.parametrize("seed", range(40))
def test_a_cursor_whose_text_is_forgotten_in_mid_answer_is_lost(seed: int) -> None:
    """Many tokens come at once, as they do after steps without proposals."""
    rng = random.Random(seed)
    size = rng.choice((1, 4, 16, 64))
    text = rng.choices(range(3), k=4 * size)
    proposer = CopyCursor(text, rng.randrange(len(text)), size)
    for _ in range(20):
        proposed = proposer.propose(5)
        assert set(proposed) <= set(text)
        text += (news := [*proposed, *rng.choices(range(3), k=rng.choice((1, 3, 10 * size)))])
        proposer.extend(news)
        assert len(proposer) == len(text)
