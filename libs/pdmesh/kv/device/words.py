"""Computes the position of each word of a KV block, in the paged cache and in the buffer.

The same arithmetic runs in Triton kernels (`kernels.py`) and, in tests, on arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.core.kv.layout.head_blocks import HeadBlocks

TILE_WORDS = 1024  # words that one program moves


_MAX_OUTER = 2  # an axis for K or V, and an axis for tokens


_WORD_BYTES = (8, 4, 2, 1)


# `cache_word` and `buffer_word` take ints, arrays or Triton's values. They have no annotations,
# because Triton would try to resolve them.
def cache_word(word, run_words, inner_count, outer_stride, inner_stride):  # type: ignore[no-untyped-def]
    """The position in the cache of word `word` of a head's block, relative to the block's start."""
    run = word // run_words
    outer = run // inner_count
    inner = run % inner_count
    return outer * outer_stride + inner * inner_stride + word % run_words


def buffer_word(row, block, num_blocks, head_words):  # type: ignore[no-untyped-def]
    """The position in the buffer where a head's block begins.

    `row` numbers the pairs of a layer and a requested head.
    """
    return (row * num_blocks + block) * head_words


@dataclass(frozen=True, slots=True)
class WordPlan:
    """The sizes and strides of a layer's cache, in words of `word_bytes`."""

    word_bytes: int
    head_words: int
    run_words: int
    inner_count: int
    outer_stride: int
    inner_stride: int
    block_stride: int
    head_stride: int

    @property
    def num_tiles(self) -> int:
        """The number of programs that move one block of one head."""
        return -(-self.head_words // TILE_WORDS)


def word_plan(where: HeadBlocks) -> WordPlan:
    """Raises ValueError for a cache with more axes than an attention block has."""
    if len(where.outer) > _MAX_OUTER:
        num = len(where.outer)
        raise ValueError(f"a head's block has {num} outer axes, more than {_MAX_OUTER}")
    strides = [where.blocks.stride, where.heads.stride, *(axis.stride for axis in where.outer)]
    size = next(w for w in _WORD_BYTES if not any(n % w for n in (where.run_bytes, *strides)))
    outer, inner = [(1, 0)] * _MAX_OUTER, [(a.count, a.stride // size) for a in where.outer]
    (_, outer_stride), (inner_count, inner_stride) = [*outer, *inner][-_MAX_OUTER:]
    return WordPlan(
        size,
        where.head_bytes // size,
        where.run_bytes // size,
        inner_count,
        outer_stride,
        inner_stride,
        where.blocks.stride // size,
        where.heads.stride // size,
    )
