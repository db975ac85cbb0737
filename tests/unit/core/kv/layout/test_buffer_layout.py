"""Sizes and offsets in the contiguous buffer that holds a prompt's KV for a transfer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.kv.layout.buffer_layout import (
    KvLayout,
    KvShape,
)
from pdmesh.core.kv.layout.rank_heads import heads_of

SMOLLM2 = KvShape(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16")


@pytest.mark.req("S3")
def test_smollm2_has_23040_bytes_per_token() -> None:
    assert SMOLLM2.token_bytes == 23_040


@pytest.mark.req("S3")
@pytest.mark.parametrize(
    ("shape", "token_bytes"),
    [
        (
            KvShape(40, 40, 128, "float16"),
            40 * 2 * 5120 * 2,
        ),  # the paper's MHA model: 2 * hidden size * 2 bytes
        (KvShape(32, 8, 128, "bfloat16"), 131_072),  # GQA with 8 of 32 heads
        (KvShape(32, 8, 128, "fp8_e4m3"), 65_536),
        # int8 with one fp32 scale for K and one for V
        (KvShape(32, 8, 128, "int8", scale_bytes=8), 65_536 + 32 * 8 * 8),
    ],
)
def test_bytes_per_token_follow_heads_and_precision(shape: KvShape, token_bytes: int) -> None:
    assert shape.token_bytes == token_bytes


@pytest.mark.req("S3")
@pytest.mark.parametrize(("num_ranks", "num_copies"), [(1, 1), (4, 1), (16, 2)])
def test_the_bytes_of_all_ranks_add_up_to_those_of_the_model_and_of_copied_heads(
    num_ranks: int, num_copies: int
) -> None:
    def shape(num_heads: int) -> KvShape:
        return KvShape(32, num_heads, 128, "int8", scale_bytes=8)

    shares = [shape(heads_of(8, num_ranks, rank).count).token_bytes for rank in range(num_ranks)]
    assert sum(shares) == num_copies * shape(8).token_bytes


@pytest.mark.req("S3")
def test_a_prompt_takes_whole_blocks() -> None:
    assert SMOLLM2.kv_bytes(64, 64) == 64 * 23_040
    assert SMOLLM2.kv_bytes(65, 64) == 128 * 23_040


layouts = st.builds(
    KvLayout, st.integers(1, 6), st.integers(1, 9), st.integers(1, 5).map(lambda n: n * 8)
)


@st.composite
def windowed(draw: st.DrawFn) -> KvLayout:
    """A layout in which each layer has its own first block. Some layers may have no block."""
    layout = draw(layouts)
    first = st.integers(0, layout.num_blocks)
    return replace(layout, first_blocks=tuple(draw(first) for _ in range(layout.num_layers)))


@pytest.mark.req("S47")
@given(st.one_of(layouts, windowed()))
def test_offsets_tile_the_buffer_in_order(layout: KvLayout) -> None:
    offsets = [
        layout.offset(layer, block)
        for layer in range(layout.num_layers)
        for block in range(layout.first_block(layer), layout.num_blocks)
    ]
    assert offsets == list(range(0, layout.total_bytes, layout.block_bytes))
    with pytest.raises(IndexError):
        layout.offset(layout.num_layers, 0)


@pytest.mark.parametrize("firsts", [(0,), (0, 0, 0), (0, 5), (-1, 0)])
def test_first_blocks_are_within_the_layout(firsts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="first blocks"):
        KvLayout(2, 4, 8, first_blocks=firsts)
