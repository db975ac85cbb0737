"""The Triton kernel that computes `digest` on a GPU. One program adds up a tile of words."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pdmesh.kv.device import digest
from pdmesh.kv.device.digest import WORD_BYTES
from pdmesh.kv.device.kernels import compiled

TILE_WORDS = 4096

_mixed = compiled(digest.mixed)
_weight = compiled(digest.weight)


# The parameters have only Triton's own annotations, as in `kernels`.
@triton.jit  # type: ignore[untyped-decorator]
def _sum(words, sums, num_words, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    at = program.to(tl.int64) * tile + tl.arange(0, tile)
    is_inside = at < num_words
    place = at.to(tl.uint64)
    word = tl.load(words + at, mask=is_inside, other=0).to(tl.uint64, bitcast=True)
    part = tl.where(is_inside, _mixed(word, place), 0)
    plain = tl.sum(part, 0)
    weighted = tl.sum(part * _weight(place), 0)
    tl.store(sums + 2 * program, plain.to(tl.int64, bitcast=True))
    tl.store(sums + 2 * program + 1, weighted.to(tl.int64, bitcast=True))


def sums_of(data: torch.Tensor) -> Any:
    """Queue the computation of both sums of `data` (uint8).

    Returns a tensor of two int64 on the device of `data`.
    """
    num_bytes = data.numel()
    if num_bytes % WORD_BYTES or data.data_ptr() % WORD_BYTES:
        padded = torch.zeros(
            -(-num_bytes // WORD_BYTES) * WORD_BYTES, dtype=torch.uint8, device=data.device
        )
        padded[:num_bytes].copy_(data)
        data = padded
    words = data.view(torch.int64)
    num_programs = -(-words.numel() // TILE_WORDS)
    sums = torch.zeros(max(1, num_programs), 2, dtype=torch.int64, device=data.device)
    if num_programs:
        _sum[(num_programs,)](words, sums, words.numel(), tile=TILE_WORDS)
    return sums.sum(0)
