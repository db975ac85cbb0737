"""The tokens that stand for images in a prompt."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.images.prompt_image import ImageFacts, expanded
from pdmesh.errors import InvalidRequest

FACTS = ImageFacts(9, (7, 9, 9, 8), 4)


@given(st.lists(st.integers(0, 12), max_size=30))
def test_each_placeholder_becomes_an_image(tokens: list[int]) -> None:
    num = tokens.count(9)
    prompt, positions = expanded(array("I", tokens), FACTS, num)
    assert len(prompt) == len(tokens) + 3 * num
    assert all(tuple(prompt[at : at + 4]) == FACTS.expansion for at in positions)
    for at in reversed(positions):
        prompt[at : at + 4] = array("I", [9])
    assert prompt.tolist() == tokens


@pytest.mark.req("S128")
@pytest.mark.parametrize(("tokens", "num"), [([1, 9], 0), ([1], 1), ([9, 9], 1), ([9], 2)])
def test_as_many_placeholders_as_images_are_needed(tokens: list[int], num: int) -> None:
    with pytest.raises(InvalidRequest, match="places for them"):
        expanded(array("I", tokens), FACTS, num)
