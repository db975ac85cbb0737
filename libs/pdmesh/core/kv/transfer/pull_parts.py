"""Decides into how many parts a pull is cut, and how large each part is (S47, S48, S49).

A pull transfers one prompt's KV in parts. One part can be gathered from the sender's cache while
another part is sent and a third is scattered into the receiver's cache. A part is some whole
layers, or a piece of a long layer. `core/kv/layout/buffer_layout.py` decides where the bytes of a
layer lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final

from pdmesh.core.kv.layout.buffer_layout import KvLayout, KvSpan

MAX_SPANS: Final = 512  # per part, because one message can name no more
# The next two constants bound a part. By measurement (docs/adr/0006), smaller parts cost
# wake-ups, and larger parts overlap less.
CHUNK_BYTES: Final = 4 << 20  # when the whole prompt is staged
LAYER_CHUNK_BYTES: Final = 2 << 20  # when layers are staged while later ones are computed
INLINE_BYTES: Final = 64 << 10  # a part of at most this size is sent inside its announcement
# Parts that are ready at the same time are sent as one, up to this size. A part costs both sides a
# round trip and 0.1 to 0.2 ms, which is more than the checksum of the joined bytes costs.
JOINED_BYTES: Final = 1 << 20
_FEW_INLINE: Final = 4  # a prompt that fits into so many inline parts is sent only in inline parts


@dataclass(frozen=True, slots=True)
class KvPart:
    """One step of a pull: the `length` bytes that begin at `offset` of the pull.

    `spans` says where these bytes are in the sender's buffer.
    """

    offset: int
    length: int
    spans: tuple[KvSpan, ...]
    first_layer: int
    end_layer: int  # the part can be sent when all layers below this one are in the buffer


def layer_chunk_bytes(layout: KvLayout) -> int:
    """The largest part, in bytes, of a pull that follows the computation layer by layer."""
    return LAYER_CHUNK_BYTES if layout.total_bytes > _FEW_INLINE * INLINE_BYTES else INLINE_BYTES


def pull_parts(
    layout: KvLayout,
    first_block: int = 0,
    heads: tuple[int, int] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    is_tapered: bool = False,
) -> tuple[KvPart, ...]:
    """Cut a pull of the blocks from `first_block` on into parts. `heads` is (first, number).

    A part consists of whole layers, as many as fit `chunk_bytes`. A longer layer is cut into parts
    that have at least one block of one head each. If `is_tapered`, parts become smaller towards the
    end of the pull, so that little is left to send when the last layer is computed. A pull of no
    blocks has one empty part. Raises IndexError if the blocks or heads are outside the layout.
    """
    first_head, num_heads = heads or (0, layout.num_heads)
    if not 0 <= first_block <= layout.num_blocks:
        raise IndexError(f"first block {first_block} is outside {layout.num_blocks} blocks")
    if first_head < 0 or num_heads < 1 or first_head + num_heads > layout.num_heads:
        asked = f"{num_heads} heads from head {first_head} on"
        raise IndexError(f"{asked} exceed {layout.num_heads} heads")
    return _parts(layout, first_block, first_head, num_heads, chunk_bytes, is_tapered)


def joined(parts: Sequence[KvPart]) -> KvPart:
    """Join consecutive parts of a pull into one."""
    first, last = parts[0], parts[-1]
    spans = _merged([span for part in parts for span in part.spans])
    length = last.offset + last.length - first.offset
    return KvPart(first.offset, length, tuple(spans), first.first_layer, last.end_layer)


@lru_cache(maxsize=256)  # prompts of the same length are cut in the same way
def _parts(
    layout: KvLayout,
    first_block: int,
    first_head: int,
    num_heads: int,
    chunk_bytes: int,
    is_tapered: bool,
) -> tuple[KvPart, ...]:
    head_bytes = layout.block_bytes // layout.num_heads
    sizes = [
        (layout.num_blocks - max(first_block, layout.first_block(layer))) * num_heads * head_bytes
        for layer in range(layout.num_layers)
    ]
    largest = max(sizes, default=0)
    if not largest:
        return (KvPart(0, 0, (), 0, 0),)
    most = max(1, MAX_SPANS // num_heads) if first_block else layout.num_layers
    parts: list[KvPart] = []
    offset = 0
    cuts = _even(sizes, chunk_bytes, most)
    if is_tapered and chunk_bytes > INLINE_BYTES:
        num_layers = max(1, min(most, chunk_bytes // largest))
        num_inline = min(num_layers, INLINE_BYTES // largest)
        cuts = _tapered(layout.num_layers, num_layers, num_inline)
    for layer, end in pairwise(cuts):
        spans = [
            row
            for i in range(layer, end)
            for row in layout.spans(i, first_block, first_head, num_heads)
        ]
        if sum(sizes[layer:end]) > chunk_bytes or len(spans) > MAX_SPANS:
            groups = [[cut] for span in spans for cut in _cut(span, head_bytes, chunk_bytes)]
        else:
            groups = [_merged(spans)]
        for group in groups:
            length = sum(span.length for span in group)
            parts.append(KvPart(offset, length, tuple(group), layer, end))
            offset += length
    return tuple(parts)


def _even(sizes: Sequence[int], chunk_bytes: int, most: int) -> list[int]:
    """Where to cut the layers. Each part has the layers that fit `chunk_bytes`, at most `most`."""
    cuts, held = [0], 0
    for layer, size in enumerate(sizes):
        is_full = held + size > chunk_bytes or layer - cuts[-1] == most
        if is_full and layer > cuts[-1]:
            cuts.append(layer)
            held = 0
        held += size
    return [*cuts, len(sizes)]


def _tapered(count: int, most: int, num_inline: int) -> list[int]:
    """Where to cut `count` layers.

    Each part has half of the layers that are left, but at least an eighth of all and at most
    `most`.

    A part that is not inline takes a round trip, however small it is. If several layers can be sent
    inline, they form the last part, and every other part has at least a quarter of all layers. So
    the last part but one is sent by the time the last layer is computed.
    """
    num_inline = num_inline if num_inline > 1 else 0
    end = max(0, count - num_inline)
    least = max(1, count // (4 if num_inline else 8))
    cuts = [0]
    while (left := end - cuts[-1]) > 0:
        cuts.append(cuts[-1] + min(left, most, max(left // 2, least)))
    return [*cuts, count] if num_inline else cuts


def _cut(span: KvSpan, unit: int, chunk_bytes: int) -> list[KvSpan]:
    """Cut a span into pieces that fit `chunk_bytes`. Each piece is one or more whole units."""
    step = max(1, chunk_bytes // unit) * unit
    return [
        KvSpan(span.offset + at, min(step, span.length - at)) for at in range(0, span.length, step)
    ]


def _merged(spans: list[KvSpan]) -> list[KvSpan]:
    """Join spans that touch."""
    merged = spans[:1]
    for span in spans[1:]:
        last = merged[-1]
        if last.offset + last.length == span.offset:
            merged[-1] = KvSpan(last.offset, last.length + span.length)
        else:
            merged.append(span)
    return merged
