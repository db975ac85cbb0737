"""A rank's paged caches, with a list of block ids for each cache group of a request.

A cache group is a set of layers that need the same share of a text: all of it, or a window. For
each layer, a transfer's buffer has only the blocks that the layer's group still needs
(`core.kv.layout.cache_groups`). If the model has one group, a copy takes all layers at once.
Otherwise each layer is copied with the block ids of its group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.core.kv.layout.cache_groups import NULL_BLOCK, STATE_WINDOW, BlockIds, CacheGroups
from pdmesh.engine.vllm.connector.worker.caches import OnDone, PagedCaches, Span, layout_of
from pdmesh.kv.transport.base import KvBytes


class GroupCaches:
    """`group_of` has the group of each layer, in the order of the layers."""

    def __init__(
        self, caches: PagedCaches, groups: CacheGroups, group_of: Sequence[int], fingerprint: str
    ) -> None:
        self._caches, self.groups, self._group_of = caches, groups, tuple(group_of)
        self._fingerprint = fingerprint
        self.num_layers, self.num_heads = caches.num_layers, caches.num_heads
        self.block_bytes = caches.block_bytes
        self.wait_for_model = caches.wait_for_model
        self.layers_with_states = frozenset(
            layer for layer, group in enumerate(group_of) if groups.windows[group] == STATE_WINDOW
        )
        self.layout = lru_cache(maxsize=256)(self._layout)  # by a prompt's length in tokens

    def _layout(self, num_tokens: int) -> KvLayout:
        firsts = self.groups.first_blocks(num_tokens)
        by_layer = tuple(firsts[group] for group in self._group_of) if any(firsts) else ()
        num_blocks = self.groups.num_blocks(num_tokens)
        return layout_of(self._caches, num_blocks, self._fingerprint, by_layer)

    def num_bytes(self, block_ids: BlockIds) -> int:
        """The bytes of these blocks in all layers of their groups."""
        return sum(len(block_ids[group]) for group in self._group_of) * self.block_bytes

    def of_layer(self, layer: int, block_ids: BlockIds) -> tuple[int, ...]:
        return block_ids[self._group_of[layer]]

    # -- whole prompts: the methods of `PagedCaches`, with block ids for each group ----------------

    def gather(self, block_ids: BlockIds, out: KvBytes, on_done: OnDone = None) -> None:
        if len(block_ids) == 1:
            self._caches.gather(block_ids[0], out, on_done)
            return
        end = self.num_bytes(block_ids)
        if out.size != end:
            raise ValueError(f"the blocks need {end} bytes, the buffer has {out.size}")
        for layer, start, size in self._rows(block_ids, self.block_bytes):
            # Copies end in the order in which they begin, so the last one's end is the end of all.
            done = on_done if start + size == end else _nothing
            ids = self.of_layer(layer, block_ids)
            self._caches.gather_layer(layer, ids, out[start : start + size], done)

    def gather_layer(
        self, layer: int, block_ids: Sequence[int], out: KvBytes, on_done: OnDone = None
    ) -> None:
        """`block_ids` has the ids in the layer's group."""
        self._caches.gather_layer(layer, block_ids, out, on_done)

    def scatter(self, source: KvBytes, block_ids: BlockIds) -> None:
        """Scatter all that was pulled, before the model's next step."""
        if len(block_ids) == 1:
            self._caches.scatter(source, block_ids[0])
            return
        for layer, start, size in self._rows(block_ids, self.block_bytes):
            ids = self.of_layer(layer, block_ids)
            self._caches.scatter_layer(layer, source[start : start + size], 0, ids)

    def scatter_part(
        self, data: KvBytes, offset: int, block_ids: BlockIds, heads: Span | None = None
    ) -> None:
        if len(block_ids) == 1:
            self._caches.scatter_part(data, offset, block_ids[0], heads)
            return
        num_heads = heads[1] if heads else self.num_heads
        end = offset + data.size
        for layer, start, size in self._rows(
            block_ids, self.block_bytes // self.num_heads * num_heads
        ):
            low, high = max(start, offset), min(start + size, end)
            if low < high:
                ids = self.of_layer(layer, block_ids)
                part = data[low - offset : high - offset]
                self._caches.scatter_layer(layer, part, low - start, ids, heads)

    def _rows(self, block_ids: BlockIds, width: int) -> Iterator[tuple[int, int, int]]:
        """Yields each layer's place in the buffer: layer, start, bytes.

        `width` is the size in bytes of a block in one layer, counting only the heads that are
        copied.
        """
        start = 0
        for layer, group in enumerate(self._group_of):
            size = len(block_ids[group]) * width
            yield layer, start, size
            start += size

    # -- single blocks, with all layers ------------------------------------------------------------

    def gather_block(self, block_ids: Sequence[int], out: KvBytes) -> None:
        """Gather one block of a prompt. `block_ids` has the block's id in each group."""
        self.gather(tuple((block_id,) for block_id in block_ids), out)

    def scatter_block(self, data: KvBytes, block_ids: Sequence[int]) -> None:
        """Scatter one block, except in groups that do not need the block."""
        if len(block_ids) == 1:
            self._caches.scatter(data, block_ids)
            return
        width = self.block_bytes
        for layer, group in enumerate(self._group_of):
            if (block_id := block_ids[group]) != NULL_BLOCK:
                part = data[layer * width : (layer + 1) * width]
                self._caches.scatter_layer(layer, part, 0, [block_id])


def _nothing() -> None:
    """The `on_done` of each copy but the last."""
