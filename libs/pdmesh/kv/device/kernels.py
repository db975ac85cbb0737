"""The Triton kernel of `operators`, which gathers and scatters KV blocks on a GPU.

One program of the kernel moves one tile of words, from one block of one head in one layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from pdmesh.kv.device import words
from pdmesh.kv.device.words import TILE_WORDS, WordPlan


def compiled(arithmetic: Callable[..., Any]) -> Any:
    """Make a plain function callable from a kernel.

    A compiled kernel can call only functions that Triton compiles. Triton's interpreter can call
    any function.
    """
    return arithmetic if triton.knobs.runtime.interpret else triton.jit(arithmetic)


_cache_word = compiled(words.cache_word)
_buffer_word = compiled(words.buffer_word)
_WORDS = {
    8: (tl.int64, torch.int64),
    4: (tl.int32, torch.int32),
    2: (tl.int16, torch.int16),
    1: (tl.int8, torch.int8),
}


# The parameters have only Triton's own annotations. Triton reads all annotations and cannot resolve
# names of `typing`.
@triton.jit  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    pointers,
    block_ids,
    buffer,
    num_blocks,
    block_stride,
    head_stride,
    outer_stride,
    inner_stride,
    first_head,
    num_heads,
    head_words: tl.constexpr,
    run_words: tl.constexpr,
    inner_count: tl.constexpr,
    word: tl.constexpr,
    tile: tl.constexpr,
    is_gather: tl.constexpr,
):
    row = tl.program_id(0)
    place = tl.program_id(1)
    layer = row // num_heads
    head = first_head + row % num_heads
    block = tl.load(block_ids + place).to(tl.int64)
    cache = tl.load(pointers + layer).to(tl.pointer_type(word))
    cache += block * block_stride + head.to(tl.int64) * head_stride
    words = tl.program_id(2) * tile + tl.arange(0, tile)
    is_inside = words < head_words
    at = cache + _cache_word(words, run_words, inner_count, outer_stride, inner_stride)
    begin = _buffer_word(row.to(tl.int64), place, num_blocks, head_words)
    if is_gather:
        tl.store(buffer + begin + words, tl.load(at, mask=is_inside), mask=is_inside)
    else:
        tl.store(at, tl.load(buffer + begin + words, mask=is_inside), mask=is_inside)


def move(
    pointers: torch.Tensor,
    block_ids: torch.Tensor,
    buffer: torch.Tensor,
    plan: WordPlan,
    first_head: int,
    num_heads: int,
    *,
    is_gather: bool,
) -> None:
    """Queue one launch on the current stream. The caller has checked all sizes."""
    word, dtype = _WORDS[plan.word_bytes]
    grid = (len(pointers) * num_heads, len(block_ids), plan.num_tiles)
    _move[grid](
        pointers,
        block_ids,
        buffer.view(dtype),
        len(block_ids),
        plan.block_stride,
        plan.head_stride,
        plan.outer_stride,
        plan.inner_stride,
        first_head,
        num_heads,
        head_words=plan.head_words,
        run_words=plan.run_words,
        inner_count=plan.inner_count,
        word=word,
        tile=TILE_WORDS,
        is_gather=is_gather,
    )
