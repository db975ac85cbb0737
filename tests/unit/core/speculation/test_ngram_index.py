"""The index finds an n-gram's earlier place as a search of the whole text would.

The work for a token does not grow with the text.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.core.speculation.ngram_index import MAX_LINKS, SIZES, NgramIndex

# a few tokens that repeat often, or any token
TOKENS = st.integers(0, 3) | st.integers(0, 2**31 - 1)


def places(text: list[int], size: int) -> list[int]:
    """The positions after the earlier places of the last n-gram, the latest position first."""
    if len(text) <= size:
        return []
    return [
        end for end in range(len(text) - 1, size - 1, -1) if text[end - size : end] == text[-size:]
    ]


def searched(text: list[int], near: int | None) -> int | None:
    for size in SIZES:
        if found := places(text, size)[:MAX_LINKS]:
            return found[0] if near is None else min(found, key=lambda end: abs(end - near))
    return None


@pytest.mark.req("S116")
@settings(max_examples=150, deadline=None)
@given(
    prompt=st.lists(TOKENS, max_size=200),
    drawn=st.lists(st.lists(TOKENS, min_size=1, max_size=5), max_size=30),
    near=st.integers(0, 300),
)
def test_it_finds_what_a_search_through_the_whole_text_finds(
    prompt: list[int], drawn: list[list[int]], near: int
) -> None:
    index, text = NgramIndex(prompt, 1 << 17), list(prompt)
    for tokens in [[], *drawn]:
        index.extend(tokens)
        text += tokens
        assert len(index) == len(text)
        assert index.next_after() == searched(text, None)
        assert index.next_after(near) == searched(text, near)


def test_a_text_may_come_at_once_or_token_by_token() -> None:
    rng = random.Random(2)
    text = [rng.randrange(20) for _ in range(3000)]
    at_once, one_by_one = NgramIndex(text, 1 << 17), NgramIndex([], 1 << 17)
    for token in text:
        one_by_one.extend([token])
    assert at_once.next_after() == one_by_one.next_after() == searched(text, None)


@pytest.mark.req("S116")
def test_the_work_for_a_token_is_the_same_in_a_text_of_100_000_tokens() -> None:
    """The test counts the entries and links that are visited, so the load of the machine does not
    matter.
    """
    rng = random.Random(4)
    per_token = []
    for length in (1_000, 10_000, 100_000):
        # About half of the text is token 0, so one bigram has thousands of places.
        index = NgramIndex([rng.choice((0, rng.randrange(500))) for _ in range(length)], 1 << 17)
        before = index.num_steps
        for _ in range(4_000):
            index.extend([rng.choice((0, rng.randrange(500)))])
            index.next_after(near=length // 2)
        per_token.append((index.num_steps - before) / 4_000)
    assert per_token[-1] < 2 * per_token[0], per_token
    assert max(per_token) < len(SIZES) * (MAX_LINKS + 4)


def test_tokens_with_equal_hashes_cost_no_more_than_the_links_that_it_follows() -> None:
    """A client could choose tokens so that all n-grams are in one bucket."""
    index = NgramIndex([7] * 50_000, 1 << 17)
    before = index.num_steps
    index.next_after(near=0)
    assert index.num_steps - before == MAX_LINKS


@pytest.mark.req("S116")
def test_a_long_text_is_forgotten_from_its_beginning() -> None:
    rng = random.Random(5)
    index, text = NgramIndex([], 300), list[int]()
    for _ in range(40):
        tokens = [rng.randrange(6) for _ in range(rng.choice((1, 30, 90)))]
        index.extend(tokens)
        text += tokens
        assert len(index) == len(text)
        kept = text[index.num_forgotten :]
        assert min(len(text), 300) <= len(kept) <= 600 + 90
        found = searched(kept, None)
        assert index.next_after() == (None if found is None else found + index.num_forgotten)
        assert index.at(len(text) - 1) == text[-1]
    assert index.num_forgotten > 0


def test_its_memory_is_in_proportion_to_the_text_that_it_keeps() -> None:
    for length in (1_000, 100_000, 1_000_000):
        kept = min(length, 2 * 131_072)
        assert NgramIndex(list(range(length)), 131_072).num_bytes <= 44 * kept


def test_a_token_is_found_between_two_positions_only() -> None:
    index = NgramIndex([5, 6, 5, 7, 5], 1 << 17)
    assert index.find(5, 0, 5) == 0
    assert index.find(5, 1, 5) == 2
    assert index.find(7, 0, 3) is None
    assert index.find(7, 4, 2) is None
    assert index.part(1, 99).tolist() == [6, 5, 7, 5]
