"""Heads of KV blocks move between caches with different strides.

Afterwards, a rank's cache equals a slice of the whole KV by its heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.core.kv.layout.head_blocks import (
    HeadBlocks,
    head_blocks,
    opaque_blocks,
    travel_shape,
)
from pdmesh.core.kv.layout.rank_heads import (
    heads_of,
    pieces,
)

RANKS = (1, 2, 4, 8)


@st.composite
def meetings(draw: st.DrawFn) -> tuple[int, int, int]:
    """The numbers of KV heads, source ranks and destination ranks.

    MHA and GQA need no distinction, because only KV heads count.
    """
    heads = draw(st.sampled_from((1, 2, 4, 8, 16, 32)))
    return heads, draw(st.sampled_from(RANKS)), draw(st.sampled_from(RANKS))


# -- on tensors -----------------------------------------------------------------------------------

NUM_LAYERS, NUM_BLOCKS, TOKENS, HEAD_DIM = 2, 7, 4, 8
# The layouts of vLLM's kernels. Each pair: the axes of the tensor, and their order in memory.
LAYOUTS = (
    ("kbnhc", "kbnhc"),  # flash attention: [2, blocks, tokens, heads, head size]
    ("bknhc", "bknhc"),  # flash attention with blocks first
    ("kbnhc", "kbhnc"),  # flash attention's HND variant, heads before tokens
    # vLLM 0.32: axis c has K and then V of a token; tokens before heads in memory
    ("bhnc", "bnhc"),
    ("bhnc", "bhnc"),  # vLLM 0.32 with heads before tokens
    ("bhnc", "hbnc"),  # vLLM 0.32 with heads outermost
)
Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True)
class Cache:
    """The paged cache of one rank in one layout, with a tensor per layer."""

    layers: list[npt.NDArray[np.uint16]]  # strided views with logical axes
    where: HeadBlocks
    axes: str

    def memory(self, layer: int) -> Bytes:
        array = self.layers[layer]
        while isinstance(array.base, np.ndarray):
            array = array.base
        return array.reshape(-1).view(np.uint8)


def make_cache(axes: str, memory_order: str, num_heads: int) -> Cache:
    counts = {"k": 2, "b": NUM_BLOCKS, "h": num_heads, "n": TOKENS}
    counts["c"] = HEAD_DIM if "k" in axes else 2 * HEAD_DIM
    layers = []
    for _ in range(NUM_LAYERS):
        physical = np.zeros([counts[a] for a in memory_order], np.uint16)
        layers.append(physical.transpose([memory_order.index(a) for a in axes]))
    strides = [s // 2 for s in layers[0].strides]
    return Cache(layers, head_blocks(axes, layers[0].shape, strides, 2), axes)


def put(cache: Cache, layer: int, block: int, kv: npt.NDArray[np.uint16]) -> None:
    """Write a block, given as [K or V, token, head, content], into the cache's layout."""
    at = [slice(None)] * len(cache.axes)
    at[cache.axes.index("b")] = block  # type: ignore[call-overload]  # an index where slices were
    view = cache.layers[layer][tuple(at)]
    named = cache.axes.replace("b", "")
    if "k" not in named:
        kv = np.concatenate((kv[0], kv[1]), axis=-1)  # [token, head, content]
    order = "knhc" if "k" in named else "nhc"
    view[...] = kv.transpose([order.index(a) for a in named])


def gather_heads(cache: Cache, ids: list[int]) -> Bytes:
    """Gather the blocks as [layer][head][block][...], with the arithmetic of the device
    operators.
    """
    where = cache.where
    out = np.zeros(NUM_LAYERS * where.heads.count * len(ids) * where.head_bytes, np.uint8)
    for start, layer, head, block in _slots(where, ids):
        memory = cache.memory(layer)
        for source, target in where.runs(block, head):
            out[start + target : start + target + where.run_bytes] = memory[
                source : source + where.run_bytes
            ]
    return out


def scatter_heads(cache: Cache, ids: list[int], first_head: int, count: int, data: Bytes) -> None:
    where = cache.where
    for start, layer, head, block in _slots(where, ids, first_head, count):
        memory = cache.memory(layer)
        for target, source in where.runs(block, head):
            memory[target : target + where.run_bytes] = data[
                start + source : start + source + where.run_bytes
            ]


def _slots(
    where: HeadBlocks, ids: list[int], first_head: int = 0, count: int | None = None
) -> list[tuple[int, int, int, int]]:
    heads = range(first_head, first_head + (where.heads.count if count is None else count))
    order = [(layer, head, b) for layer in range(NUM_LAYERS) for head in heads for b in ids]
    return [(i * where.head_bytes, *slot) for i, slot in enumerate(order)]


@pytest.mark.req("S57")
@settings(max_examples=60)
@given(
    meetings().filter(lambda m: m[0] <= 8),
    st.sampled_from(LAYOUTS),
    st.sampled_from(LAYOUTS),
    st.integers(0, 2**32 - 1),
    st.integers(1, 4),
)
def test_the_moved_bytes_equal_a_slice_of_the_whole(
    meeting: tuple[int, int, int],
    source_layout: tuple[str, str],
    target_layout: tuple[str, str],
    seed: int,
    num_used: int,
) -> None:
    """The two caches may have different strides, as long as both keep the bytes of a head's block
    in the same order.
    """
    num_heads, num_sources, num_destinations = meeting
    if ("k" in source_layout[0]) != ("k" in target_layout[0]):
        target_layout = source_layout
    rng = np.random.default_rng(seed)
    shape = (NUM_LAYERS, num_used, 2, TOKENS, num_heads, HEAD_DIM)
    whole = rng.integers(0, 1 << 16, shape, np.uint16)

    def rank_cache(layout: tuple[str, str], num_ranks: int, rank: int, ids: list[int]) -> Cache:
        mine = heads_of(num_heads, num_ranks, rank)
        cache = make_cache(*layout, mine.count)
        for layer in range(NUM_LAYERS):
            for i, block in enumerate(ids):
                put(
                    cache, layer, block, whole[layer, i, :, :, mine.first : mine.first + mine.count]
                )
        return cache

    source_ids, target_ids = (rng.permutation(NUM_BLOCKS)[:num_used].tolist() for _ in range(2))
    staged = [
        gather_heads(rank_cache(source_layout, num_sources, rank, source_ids), source_ids)
        for rank in range(num_sources)
    ]
    for rank in range(num_destinations):
        mine = heads_of(num_heads, num_destinations, rank)
        got = make_cache(*target_layout, mine.count)
        for piece in pieces(num_heads, num_sources, num_destinations, rank):
            by_head = staged[piece.source_rank].reshape(
                NUM_LAYERS, -1, num_used, got.where.head_bytes
            )
            moved = by_head[:, piece.source_head : piece.source_head + piece.count]
            data = np.ascontiguousarray(moved).reshape(-1)
            scatter_heads(got, target_ids, piece.head, piece.count, data)
        expected = rank_cache(target_layout, num_destinations, rank, target_ids)
        for layer in range(NUM_LAYERS):
            assert (got.layers[layer] == expected.layers[layer]).all()


def test_runs_are_as_long_as_the_memory_allows() -> None:
    assert make_cache("kbnhc", "kbnhc", 4).where.run_bytes == HEAD_DIM * 2
    assert make_cache("kbnhc", "kbhnc", 4).where.run_bytes == TOKENS * HEAD_DIM * 2
    assert make_cache("bhnc", "bhnc", 4).where.run_bytes == TOKENS * 2 * HEAD_DIM * 2
    whole = opaque_blocks(5, 96)
    assert (whole.head_bytes, whole.block_bytes, whole.runs(3, 0)) == (96, 96, [(288, 0)])


def test_caches_that_may_exchange_blocks_have_equal_travel_shapes() -> None:
    flash = travel_shape("kbnhc", (2, 9, 16, 4, 64), 2)
    assert flash == travel_shape("bknhc", (5, 2, 16, 8, 64), 2) == (2, 16, 64, 2)
    assert flash != travel_shape("bhnc", (9, 4, 16, 128), 2), "K and V alternate by token there"
    with pytest.raises(ValueError, match="axes"):
        head_blocks("bnc", (1, 2, 3), (6, 3, 1), 2)
    with pytest.raises(ValueError, match="contiguous content"):
        head_blocks("bhnc", (2, 2, 2, 2), (1, 2, 4, 8), 2)
