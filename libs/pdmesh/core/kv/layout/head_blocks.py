"""Finds where each KV head's bytes lie in a layer's paged cache, and in which order they are sent.

Engines order the tokens and heads of a block differently. The values of one head and token are
called content here. K and V may have a dimension of their own, or V may follow K in the content. A
transfer sends a layer's bytes in the order [head][block][K or V][token][content], so that any run
of heads is contiguous. Two caches may exchange blocks if the dimensions of a head's block have
equal sizes in that order. The strides of the caches may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

BLOCK, HEAD, TOKEN, KV, CONTENT = "b", "h", "n", "k", "c"
_TRAVEL_ORDER = (KV, TOKEN, CONTENT)


@dataclass(frozen=True, slots=True)
class Axis:
    count: int
    stride: int  # bytes


@dataclass(frozen=True, slots=True)
class HeadBlocks:
    """One layer's cache on one rank.

    The block of one head consists of runs of `run_bytes` contiguous bytes. `outer` has the axes
    over these runs, in the order of the transfer, the fastest axis last. A cache of opaque blocks
    has one head, whose block is one run.
    """

    blocks: Axis
    heads: Axis
    outer: tuple[Axis, ...]
    run_bytes: int

    @property
    def head_bytes(self) -> int:
        """The bytes of one block of one head."""
        return prod(axis.count for axis in self.outer) * self.run_bytes

    @property
    def block_bytes(self) -> int:
        """The bytes of one block of all the rank's heads."""
        return self.heads.count * self.head_bytes

    @property
    def is_dense(self) -> bool:
        """Whether each head's block is contiguous and follows the block before it without a gap."""
        heads = not self.outer and self.heads.stride == self.run_bytes
        return heads and self.blocks.stride == self.block_bytes

    def runs(self, block: int, head: int) -> list[tuple[int, int]]:
        """For each run, its byte offsets in the cache and in the transferred block of the head."""
        starts = [block * self.blocks.stride + head * self.heads.stride]
        for axis in self.outer:
            starts = [s + i * axis.stride for s in starts for i in range(axis.count)]
        return [(start, i * self.run_bytes) for i, start in enumerate(starts)]


def opaque_blocks(num_blocks: int, block_bytes: int) -> HeadBlocks:
    """A cache whose blocks are copied as opaque bytes."""
    return HeadBlocks(Axis(num_blocks, block_bytes), Axis(1, block_bytes), (), block_bytes)


def head_blocks(
    axes: str, shape: Sequence[int], strides: Sequence[int], item_bytes: int
) -> HeadBlocks:
    """The layout of a cache in a tensor. `axes` has one letter per dimension. Strides are in items.

    "kbnhc" is flash attention's [2, blocks, tokens, heads, head size]. "bknhc" is the same with
    blocks first. In "bhnc", V follows K in the content. Raises ValueError if `axes` does not fit
    `shape`, or if the content is not contiguous.
    """
    if sorted(axes) not in (sorted("bhnc"), sorted("kbhnc")) or len(shape) != len(axes):
        raise ValueError(f"axes {axes!r} cannot name a cache of shape {tuple(shape)}")
    named = {
        name: Axis(count, stride * item_bytes)
        for name, count, stride in zip(axes, shape, strides, strict=True)
    }
    content = named[CONTENT]
    if content.stride != item_bytes and content.count > 1:
        raise ValueError(f"a cache of strides {tuple(strides)} has no contiguous content")
    run_bytes, outer = (
        content.count * item_bytes,
        [named[a] for a in _TRAVEL_ORDER[:-1] if a in named],
    )
    while outer and (outer[-1].count == 1 or outer[-1].stride == run_bytes):
        run_bytes *= outer.pop().count
    return HeadBlocks(named[BLOCK], named[HEAD], tuple(outer), run_bytes)


def travel_shape(axes: str, shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    """The shape of a head's block in a transfer. Caches of equal shape may exchange blocks."""
    named = dict(zip(axes, shape, strict=True))
    return (*(named[a] for a in _TRAVEL_ORDER if a in named), item_bytes)
