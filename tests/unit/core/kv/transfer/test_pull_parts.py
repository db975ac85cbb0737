"""A pull is divided into parts of bounded size, which hold all requested bytes in order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.core.kv.transfer.pull_parts import (
    INLINE_BYTES,
    LAYER_CHUNK_BYTES,
    MAX_SPANS,
    layer_chunk_bytes,
    pull_parts,
)

layouts = st.builds(
    KvLayout, st.integers(1, 6), st.integers(1, 9), st.integers(1, 5).map(lambda n: n * 8)
)


@st.composite
def pulls(draw: st.DrawFn) -> tuple[KvLayout, int, tuple[int, int] | None, int]:
    """A layout, the first block and the heads to pull, and the size of a part."""
    num_heads = draw(st.integers(1, 4))
    layout = KvLayout(
        draw(st.integers(0, 6)), draw(st.integers(0, 9)), 8 * num_heads, num_heads=num_heads
    )
    firsts = st.lists(
        st.integers(0, layout.num_blocks), min_size=layout.num_layers, max_size=layout.num_layers
    )
    if draw(st.booleans()):
        layout = replace(layout, first_blocks=tuple(draw(firsts)))
    first = draw(st.integers(0, layout.num_blocks))
    head = draw(st.integers(0, num_heads - 1))
    heads = (head, draw(st.integers(1, num_heads - head)))
    return layout, first, draw(st.sampled_from([None, heads])), draw(st.integers(1, 600))


@pytest.mark.req("S47", "S48", "S49", "S57")
@given(pulls())
def test_parts_hold_exactly_what_is_wanted_in_order(
    pull: tuple[KvLayout, int, tuple[int, int] | None, int],
) -> None:
    layout, first, heads, chunk = pull
    parts = pull_parts(layout, first, heads, chunk)
    head, num_heads = heads or (0, layout.num_heads)
    unit = layout.block_bytes // layout.num_heads
    held = [  # the head blocks in the order of the buffer
        (layer, h, block)
        for layer in range(layout.num_layers)
        for h in range(layout.num_heads)
        for block in range(layout.first_block(layer), layout.num_blocks)
    ]
    wanted = [
        place * unit + i
        for place, (_, h, block) in enumerate(held)
        if head <= h < head + num_heads and block >= first
        for i in range(unit)
    ]
    spans = [span for part in parts for span in part.spans]
    assert [i for s in spans for i in range(s.offset, s.offset + s.length)] == wanted
    end = 0
    for part in parts:
        assert part.offset == end
        assert part.length == sum(span.length for span in part.spans)
        assert part.length <= max(chunk, unit), "a part is small, or one block"
        assert part.length % unit == 0
        for span in part.spans:
            assert layout.layer_start(part.first_layer) <= span.offset
            assert span.offset + span.length <= layout.layer_start(part.end_layer)
        end += part.length
    assert end == len(wanted)


@pytest.mark.req("S49")
@given(layouts)
def test_a_whole_prompt_that_fits_one_part_is_one_range(layout: KvLayout) -> None:
    (part,) = pull_parts(layout)
    assert [(span.offset, span.length) for span in part.spans] == [(0, layout.total_bytes)]


def test_short_layers_share_a_part_with_each_other_and_not_with_a_long_one() -> None:
    """In Gemma 3, five of six layers have a window."""
    layout = KvLayout(12, 100, 64, first_blocks=(90, 90, 90, 90, 90, 0) * 2)
    parts = pull_parts(layout, chunk_bytes=6400)
    assert [(part.first_layer, part.end_layer) for part in parts] == [
        (0, 5),
        (5, 6),
        (6, 11),
        (11, 12),
    ]
    tapered = pull_parts(layout, chunk_bytes=layout.total_bytes, is_tapered=True)
    assert sum(part.length for part in tapered) == layout.total_bytes


@pytest.mark.req("S49")
def test_parts_name_no_more_spans_than_a_message_can() -> None:
    for layout in (KvLayout(700, 4, 8), KvLayout(80, 4, 64, num_heads=8)):
        parts = pull_parts(layout, first_block=1)
        assert max(len(part.spans) for part in parts) <= MAX_SPANS
        assert sum(len(part.spans) for part in parts) == layout.num_layers * layout.num_heads


@pytest.mark.parametrize(
    ("first", "heads"), [(-1, None), (10, None), (0, (0, 3)), (0, (2, 1)), (0, (0, 0))]
)
def test_a_pull_outside_the_layout_has_no_parts(first: int, heads: tuple[int, int] | None) -> None:
    with pytest.raises(IndexError):
        pull_parts(KvLayout(3, 9, 16, num_heads=2), first, heads)


@pytest.mark.parametrize(
    ("total_bytes", "num_layers"),
    [
        (32 << 10, [32]),
        (256 << 10, [8, 8, 8, 8]),
        (1 << 20, [15, 8, 7, 2]),
        (2 << 20, [16, 8, 4, 4]),
        (4 << 20, [16, 8, 4, 4]),
        (8 << 20, [8, 8, 8, 4, 4]),
        (16 << 20, [4] * 8),
        (256 << 20, [1] * 32 * 4),
    ],
)
@pytest.mark.req("S48")
def test_little_of_a_prompt_is_left_to_move_when_its_last_layer_is_computed(
    total_bytes: int, num_layers: list[int]
) -> None:
    layout = KvLayout(32, 128, total_bytes // 32 // 128)
    parts = pull_parts(layout, chunk_bytes=layer_chunk_bytes(layout), is_tapered=True)
    assert [part.end_layer - part.first_layer for part in parts] == num_layers


@pytest.mark.req("S48")
@given(st.integers(1, 100), st.integers(1, LAYER_CHUNK_BYTES))
def test_shrinking_parts_are_few_and_the_last_one_is_small(
    num_layers: int, layer_bytes: int
) -> None:
    layout = KvLayout(num_layers, 1, layer_bytes)
    chunk_bytes = layer_chunk_bytes(layout)
    parts = pull_parts(layout, chunk_bytes=chunk_bytes, is_tapered=True)
    assert [part.first_layer for part in parts] == [0, *(p.end_layer for p in parts[:-1])]
    assert parts[-1].end_layer == num_layers
    assert sum(part.length for part in parts) == layout.total_bytes
    assert all(part.length <= max(chunk_bytes, layer_bytes) for part in parts)
    plain = pull_parts(layout, chunk_bytes=chunk_bytes)
    assert len(parts) <= len(plain) + 6
    assert parts[-1].length <= max(layer_bytes, layout.total_bytes // 8, INLINE_BYTES)
