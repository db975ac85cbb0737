"""The blocks that the next token needs, in layers with and without a window.

A cache group has the layers that need the same share of a text: all of it, a window, or a state.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.core.kv.layout.cache_groups import (
    STATE_WINDOW,
    CacheGroups,
    first_needed,
    kv_bytes,
)

SIZES = st.integers(1, 9)


@given(num_tokens=st.integers(0, 200), window=st.integers(0, 90), block_size=SIZES)
def test_the_first_needed_block_has_the_first_token_that_the_next_one_sees(
    num_tokens: int, window: int, block_size: int
) -> None:
    seen = [t for t in range(num_tokens + 1) if not window or num_tokens - t < window]
    assert first_needed(num_tokens, window, block_size) == seen[0] // block_size


@pytest.mark.parametrize(("windows", "group"), [((0,), 0), ((8, 0, 8), 1), ((8, 8), 0)])
def test_a_group_without_a_window_stands_for_a_prefix(windows: tuple[int, ...], group: int) -> None:
    groups = CacheGroups(4, windows)
    assert (groups.first_full, len(groups)) == (group, len(windows))


def test_of_each_group_the_needed_blocks_of_a_range_are_named() -> None:
    groups = CacheGroups(4, (0, 6))
    lists = [[10, 11, 12, 13], [0, 0, 22, 23]]
    assert groups.needed(lists, 14, 0, 4) == ((10, 11, 12, 13), (22, 23))
    assert groups.needed(lists, 14, 1, 3) == ((11, 12), (22,))
    assert groups.needed(lists, 14, 3, 4) == ((13,), (23,))
    assert groups.needed(lists, 14, 0, 2) == ((10, 11), ())


@given(num_tokens=st.integers(1, 300), block_size=SIZES)
def test_of_a_state_the_block_of_the_last_token_alone_is_needed(
    num_tokens: int, block_size: int
) -> None:
    groups = CacheGroups(block_size, (STATE_WINDOW, 0))
    count = groups.num_blocks(num_tokens)
    ids = tuple(range(1, count + 1))
    needed = groups.needed((ids, ids), num_tokens, 0, count)
    assert needed == (ids[-1:], ids)
    assert groups.states(needed) == (ids[-1:], ())


@given(
    num_tokens=st.integers(1, 100),
    windows=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    block_size=SIZES,
)
def test_a_tickets_bytes_are_those_of_its_layout(
    num_tokens: int, windows: list[int], block_size: int
) -> None:
    firsts = tuple(first_needed(num_tokens, window, block_size) for window in windows)
    layout = KvLayout(len(windows), -(-num_tokens // block_size), 64, first_blocks=firsts)
    block_bytes = 64 * len(windows)
    assert kv_bytes(num_tokens, block_size, block_bytes, windows) == layout.total_bytes
    assert kv_bytes(num_tokens, block_size, block_bytes) >= layout.total_bytes
