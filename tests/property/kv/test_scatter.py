"""Paged KV blocks are gathered into a contiguous buffer and scattered again without a change."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.kv.layout.buffer_layout import (
    KvLayout,
)
from pdmesh.kv.device.scatter import (
    gather,
    recv_scatter,
    runs_of,
    scatter_part,
)

layouts = st.builds(
    KvLayout, st.integers(1, 6), st.integers(1, 9), st.integers(1, 5).map(lambda n: n * 8)
)


@pytest.mark.req("S50")
@given(
    num_layers=st.integers(1, 4),
    block_bytes=st.integers(1, 40),
    num_blocks=st.integers(1, 24),
    data=st.data(),
)
def test_gathered_blocks_scatter_back(
    num_layers: int, block_bytes: int, num_blocks: int, data: st.DataObject
) -> None:
    """The blocks are scattered to other random places of another cache."""
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    used = data.draw(st.integers(0, num_blocks))
    source_ids = rng.permutation(num_blocks)[:used].tolist()
    target_ids = rng.permutation(num_blocks)[:used].tolist()
    shape = (num_blocks, block_bytes)
    sources = [rng.integers(0, 256, shape, np.uint8) for _ in range(num_layers)]
    targets = [rng.integers(0, 256, shape, np.uint8) for _ in range(num_layers)]
    before = [t.copy() for t in targets]
    buffer = np.zeros(num_layers * used * block_bytes, np.uint8)

    gather(sources, source_ids, buffer)
    layout = KvLayout(num_layers, used, block_bytes)
    for layer, source in enumerate(sources):
        for block, source_id in enumerate(source_ids):
            at = layout.offset(layer, block)
            assert (buffer[at : at + block_bytes] == source[source_id]).all()
    recv_scatter(buffer, targets, target_ids)
    for source, target, old in zip(sources, targets, before, strict=True):
        assert (target[target_ids] == source[source_ids]).all()
        others = [i for i in range(num_blocks) if i not in target_ids]
        assert (target[others] == old[others]).all(), "a block outside the request changed"


@pytest.mark.req("S50")
@given(
    num_layers=st.integers(1, 4),
    num_words=st.integers(1, 5),
    first=st.integers(0, 20),
    cuts=st.sets(st.integers(0, 40), max_size=6),
    used=st.integers(1, 10),
    is_run=st.booleans(),
)
def test_parts_of_a_buffer_scatter_as_the_whole_does(
    num_layers: int, num_words: int, first: int, cuts: set[int], used: int, is_run: bool
) -> None:
    """A part may begin and end at any block. The cache's blocks may be consecutive or not."""
    block_bytes, rng = num_words * 8, np.random.default_rng(first)
    ids = list(range(first, first + used)) if is_run else rng.permutation(31)[:used].tolist()
    whole = [np.zeros((31, block_bytes), np.uint8) for _ in range(num_layers)]
    parted = [cache.copy() for cache in whole]
    buffer = rng.integers(0, 256, num_layers * used * block_bytes, np.uint8)
    recv_scatter(buffer, whole, ids)
    total = num_layers * used
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < total), total]
    for a, b in pairwise(edges):
        scatter_part(buffer[a * block_bytes : b * block_bytes], a * block_bytes, parted, ids)
    assert all((a == b).all() for a, b in zip(whole, parted, strict=True))


def test_a_part_of_a_block_or_beyond_the_buffer_is_refused() -> None:
    caches = [np.zeros((4, 8), np.uint8)] * 2
    for offset, size in ((0, 12), (4, 8), (24, 16), (-8, 8)):
        with pytest.raises(ValueError, match="bytes"):
            scatter_part(np.zeros(size, np.uint8), offset, caches, [1, 2])


def test_consecutive_blocks_are_one_run() -> None:
    ids = np.array([4, 5, 6, 2, 3, 9], dtype=np.intp)
    assert runs_of(ids) == [(4, 0, 3), (2, 3, 2), (9, 5, 1)]
    assert runs_of(ids[:0]) == []


@pytest.mark.req("S50")
@pytest.mark.parametrize("ids", [[-1], [4], [0, 9]])
def test_block_ids_outside_the_cache_are_refused(ids: list[int]) -> None:
    caches = [np.zeros((4, 8), np.uint8)]
    buffer = np.zeros(8 * len(ids), np.uint8)
    with pytest.raises(ValueError, match="outside"):
        gather(caches, ids, buffer)
    with pytest.raises(ValueError, match="outside"):
        recv_scatter(buffer, caches, ids)


def test_a_buffer_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="need 16 bytes"):
        gather([np.zeros((4, 8), np.uint8)], [0, 1], np.zeros(8, np.uint8))


def test_strided_caches_are_refused() -> None:
    cache = np.zeros((8, 16), np.uint8)[:, ::2]
    with pytest.raises(ValueError, match="contiguous"):
        gather([cache], [0], np.zeros(8, np.uint8))
