"""The interface to vLLM's paged KV cache. Each kind of device has its own implementation.

To gather is to copy blocks into one contiguous buffer for a transfer, and to scatter is the
reverse. The buffer is [layer][head][block], see `core.kv.layout.head_blocks`. An opaque block,
whose heads cannot be separated, counts as one head. Layers are in the order in which the model
computes them. Engines that exchange KV have the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.core.kv.layout.head_blocks import HeadBlocks
from pdmesh.kv.transport.base import KvBytes

Span = tuple[int, int]  # first, number
OnDone = Callable[[], None] | None


class PagedCaches(Protocol):
    """`on_done` is called exactly once: before the call returns, or later from another thread.

    Without `on_done`, the copy is complete when the call returns.
    """

    num_layers: int
    num_heads: int  # of this rank; 1 where blocks are opaque
    block_bytes: int  # of one layer, all heads

    def wait_for_model(self) -> None:
        """Return when the model has finished all work that it was given."""
        ...

    def gather(self, block_ids: Sequence[int], out: KvBytes, on_done: OnDone = None) -> None:
        """Gather all layers of the blocks into `out`, as the model has written them so far.

        The model may overwrite the blocks as soon as the call returns.
        """
        ...

    def gather_layer(
        self, layer: int, block_ids: Sequence[int], out: KvBytes, on_done: OnDone = None
    ) -> None:
        """Gather one layer, within the forward that computes it."""
        ...

    def scatter(
        self,
        source: KvBytes,
        block_ids: Sequence[int],
        on_done: OnDone = None,
        heads: Span | None = None,
    ) -> None:
        """Scatter `source` before the model's next step.

        `source` has all layers, with all heads or only `heads`. The caller may reuse `source` after
        `on_done`.
        """
        ...

    def scatter_part(
        self, data: KvBytes, offset: int, block_ids: Sequence[int], heads: Span | None = None
    ) -> None:
        """Scatter a part of the bytes that `scatter` takes. The part begins at `offset`.

        The part must consist of whole blocks of single heads. The call runs on the KV agent's
        thread. The copy is complete when the call returns.
        """
        ...

    def scatter_layer(
        self,
        layer: int,
        data: KvBytes,
        offset: int,
        block_ids: Sequence[int],
        heads: Span | None = None,
    ) -> None:
        """Like `scatter_part`, for one layer and its own blocks. `offset` is within the layer.

        The copy is complete when the call returns.
        """
        ...


def layout_of(
    caches: PagedCaches, num_blocks: int, fingerprint: str, first_blocks: tuple[int, ...] = ()
) -> KvLayout:
    """The layout of the contiguous buffer of `num_blocks` blocks.

    `first_blocks` has the same meaning as in `KvLayout`.
    """
    return KvLayout(
        caches.num_layers,
        num_blocks,
        caches.block_bytes,
        fingerprint,
        caches.num_heads,
        first_blocks,
    )


def part_rows(
    where: HeadBlocks, data: KvBytes, offset: int, num_blocks: int, heads: Span | None
) -> Iterator[tuple[int, int, int, KvBytes]]:
    """Split a part of a prompt's bytes into rows: layer, head, first block, bytes of the blocks.

    Raises ValueError if the part splits a block.
    """
    if offset % where.head_bytes or data.size % where.head_bytes:
        raise ValueError(f"{data.size} bytes at {offset} are not whole blocks of a head")
    first_head, num_heads = heads or (0, where.heads.count)
    num_all, width = data.size // where.head_bytes, where.head_bytes
    place, done = offset // width, 0
    while done < num_all:
        row, first = divmod(place + done, num_blocks)
        count = min(num_blocks - first, num_all - done)
        layer, head = divmod(row, num_heads)
        yield layer, first_head + head, first, data[done * width : (done + count) * width]
        done += count
