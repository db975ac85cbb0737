"""The placeholder tokens that stand for images in a prompt."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.images.prompt_image import ImageFacts, expanded, least_length
from pdmesh.core.images.token_grid import GridRule
from pdmesh.errors import InvalidRequest

FACTS = ImageFacts(9, (7, 9, 9, 8), 4)
GRIDDED = ImageFacts(9, (), 4, GridRule(10, 400, 4000))
SIZES = [(30, 20), (20, 30), (1, 1), (500, 100)]


@given(st.lists(st.integers(0, 12), max_size=30))
def test_each_placeholder_becomes_an_image(tokens: list[int]) -> None:
    num = tokens.count(9)
    prompt, places = expanded(array("I", tokens), FACTS, [(8, 8)] * num)
    assert len(prompt) == len(tokens) + 3 * num
    assert least_length(len(tokens), FACTS, num) == len(prompt)
    assert all(place[1:] == (4, 0) for place in places)
    assert all(tuple(prompt[at : at + 4]) == FACTS.expansion for at, _, _ in places)
    for at, _, _ in reversed(places):
        prompt[at : at + 4] = array("I", [9])
    assert prompt.tolist() == tokens


@pytest.mark.req("S129")
@given(st.lists(st.sampled_from(SIZES), max_size=4), st.integers(0, 3))
def test_an_image_may_take_tokens_by_its_size(sizes: list[tuple[int, int]], gap: int) -> None:
    tokens = array("I", [*[1] * gap, 9] * len(sizes) + [2])
    prompt, places = expanded(tokens, GRIDDED, sizes)
    assert GRIDDED.grid is not None
    for (width, height), (at, num_tokens, num_rows) in zip(sizes, places, strict=True):
        rows, columns = GRIDDED.grid.grid_of(width, height)
        assert (num_tokens, num_rows) == (rows * columns, rows)
        assert tuple(prompt[at : at + num_tokens]) == (9,) * num_tokens
    num = sum(place.num_tokens for place in places)
    assert prompt.count(9) == num
    assert (
        len(prompt)
        == len(tokens) - len(sizes) + num
        >= least_length(len(tokens), GRIDDED, len(sizes))
    )


@pytest.mark.req("S128")
@pytest.mark.parametrize(("tokens", "num"), [([1, 9], 0), ([1], 1), ([9, 9], 1), ([9], 2)])
def test_as_many_placeholders_as_images_are_needed(tokens: list[int], num: int) -> None:
    with pytest.raises(InvalidRequest, match="places for them"):
        expanded(array("I", tokens), FACTS, [(8, 8)] * num)
