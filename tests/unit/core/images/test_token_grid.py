"""Tests the grid of tokens, in rows and columns, that an image becomes in models like Qwen2-VL."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pdmesh.core.images.image_bounds import MAX_RATIO
from pdmesh.core.images.token_grid import GridRule

pytestmark = pytest.mark.req("S129")
QWEN2_VL = GridRule(28, 56 * 56, 28 * 28 * 1280)


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((640, 480), (17, 23)),
        ((480, 640), (23, 17)),
        ((56, 56), (2, 2)),
        ((1, 1), (2, 2)),  # too small, so enlarged to the smallest number of pixels
        ((42, 42), (2, 2)),  # 1.5 is rounded to the even number, as Python does
        ((70, 70), (2, 2)),
        ((4032, 3024), (30, 41)),  # a photo, which is too large
        ((20_000, 100), (2, 505)),
    ],
)
def test_an_image_is_resized_as_by_qwen2_vl(size: tuple[int, int], grid: tuple[int, int]) -> None:
    assert QWEN2_VL.grid_of(*size) == grid


def test_a_thin_image_keeps_a_row() -> None:
    rule = GridRule(14, 784, 7840)
    assert rule.grid_of(4096, 21) == (1, 88)
    assert rule.grid_of(21, 4096) == (88, 1)
    assert rule.most_tokens == 40


SIDES = st.integers(1, 5000)


@given(SIDES, SIDES, st.integers(1, 40), st.integers(1, 50), st.integers(16, 2000))
def test_an_image_takes_as_many_tokens_as_the_rule_allows(
    width: int, height: int, factor: int, least: int, times: int
) -> None:
    assume(max(width, height) <= MAX_RATIO * min(width, height))
    rule = GridRule(factor, least * factor**2, times * least * factor**2)
    rows, columns = rule.grid_of(width, height)
    assert rows > 0 < columns
    assert rule.grid_of(height, width) == (columns, rows)
    most = rule.most_tokens
    assert rows * columns <= most + math.sqrt(MAX_RATIO * most) + 3
    if max(width, height) <= 2 * min(width, height):
        assert least <= rows * columns <= most
