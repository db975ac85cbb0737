"""Implements `PagedCaches` for vLLM's paged KV cache in host memory, with numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pdmesh.core.kv.layout.head_blocks import HeadBlocks
from pdmesh.engine.vllm.connector.worker.caches import OnDone, Span, part_rows
from pdmesh.kv.device.scatter import HostBlocks
from pdmesh.kv.transport.base import KvBytes
from pdmesh.kv.transport.memory_access import in_host


class HostCaches:
    """Accesses caches in which each head's block is one piece.

    An opaque block, whose heads cannot be separated, counts as one head. A layer is an array of
    such pieces: head `h` of block `b` is row `b * num_heads + h`.
    """

    def __init__(self, rows: Sequence[npt.NDArray[np.uint8]], num_heads: int = 1) -> None:
        self._blocks = HostBlocks(rows)
        self._layers = [HostBlocks([row]) for row in rows]
        self.num_layers, self.num_heads = len(rows), num_heads
        self.block_bytes = num_heads * int(rows[0].shape[1])

    def wait_for_model(self) -> None:
        """There is nothing to wait for, because the model computes on the calling thread."""

    def gather(self, block_ids: Sequence[int], out: KvBytes, on_done: OnDone = None) -> None:
        self._blocks.gather(self._rows(block_ids, None), in_host(out))
        if on_done is not None:
            on_done()

    def gather_layer(
        self, layer: int, block_ids: Sequence[int], out: KvBytes, on_done: OnDone = None
    ) -> None:
        self._layers[layer].gather(self._rows(block_ids, None), in_host(out))
        if on_done is not None:
            on_done()

    def scatter(
        self,
        source: KvBytes,
        block_ids: Sequence[int],
        on_done: OnDone = None,
        heads: Span | None = None,
    ) -> None:
        self._blocks.scatter(in_host(source), self._rows(block_ids, heads))
        if on_done is not None:
            on_done()

    def scatter_part(
        self, data: KvBytes, offset: int, block_ids: Sequence[int], heads: Span | None = None
    ) -> None:
        self._blocks.scatter_part(in_host(data), offset, self._rows(block_ids, heads))

    def scatter_layer(
        self,
        layer: int,
        data: KvBytes,
        offset: int,
        block_ids: Sequence[int],
        heads: Span | None = None,
    ) -> None:
        self._layers[layer].scatter_part(in_host(data), offset, self._rows(block_ids, heads))

    def _rows(self, block_ids: Sequence[int], heads: Span | None) -> npt.NDArray[np.intp]:
        """The rows of the blocks' `heads`, head after head, as in the buffer of a transfer."""
        first, count = heads or (0, self.num_heads)
        assert first + count <= self.num_heads, "opaque blocks have no heads"
        starts = np.asarray(block_ids, dtype=np.intp) * self.num_heads
        return (np.arange(first, first + count)[:, None] + starts).ravel()


def dense_rows(caches: Sequence[torch.Tensor], where: HeadBlocks) -> list[npt.NDArray[np.uint8]]:
    """The rows for `HostCaches` of caches without gaps between the heads' blocks (`is_dense`)."""
    shape = (where.blocks.count * where.heads.count, where.head_bytes)
    return [c.view(torch.uint8).reshape(-1).numpy().reshape(shape) for c in caches]


class HostHeads:
    """Accesses caches in which a head's block may be in several pieces, at regular distances."""

    def __init__(self, caches: Sequence[torch.Tensor], where: HeadBlocks) -> None:
        self._where = where
        self._layers = [_by_head(cache, where) for cache in caches]
        self.num_layers, self.num_heads = len(caches), where.heads.count
        self.block_bytes = where.block_bytes

    def wait_for_model(self) -> None:
        """There is nothing to wait for, because the model computes on the calling thread."""

    def gather(self, block_ids: Sequence[int], out: KvBytes, on_done: OnDone = None) -> None:
        by_layer = self._buffer(out, self.num_layers, self.num_heads, len(block_ids))
        for target, cache in zip(by_layer, self._layers, strict=True):
            target[...] = cache[:, np.asarray(block_ids)]
        if on_done is not None:
            on_done()

    def gather_layer(
        self, layer: int, block_ids: Sequence[int], out: KvBytes, on_done: OnDone = None
    ) -> None:
        (target,) = self._buffer(out, 1, self.num_heads, len(block_ids))
        target[...] = self._layers[layer][:, np.asarray(block_ids)]
        if on_done is not None:
            on_done()

    def scatter(
        self,
        source: KvBytes,
        block_ids: Sequence[int],
        on_done: OnDone = None,
        heads: Span | None = None,
    ) -> None:
        first, count = heads or (0, self.num_heads)
        by_layer = self._buffer(source, self.num_layers, count, len(block_ids))
        for landed, cache in zip(by_layer, self._layers, strict=True):
            cache[first : first + count, np.asarray(block_ids)] = landed
        if on_done is not None:
            on_done()

    def scatter_part(
        self, data: KvBytes, offset: int, block_ids: Sequence[int], heads: Span | None = None
    ) -> None:
        self._scatter_rows(0, data, offset, block_ids, heads)

    def scatter_layer(
        self,
        layer: int,
        data: KvBytes,
        offset: int,
        block_ids: Sequence[int],
        heads: Span | None = None,
    ) -> None:
        self._scatter_rows(layer, data, offset, block_ids, heads)

    def _scatter_rows(
        self,
        first_layer: int,
        data: KvBytes,
        offset: int,
        block_ids: Sequence[int],
        heads: Span | None,
    ) -> None:
        rows = part_rows(self._where, data, offset, len(block_ids), heads)
        for layer, head, first, landed in rows:
            count = landed.size // self._where.head_bytes
            ids = np.asarray(block_ids[first : first + count])
            shape = [count, *(axis.count for axis in self._where.outer), -1]
            self._layers[first_layer + layer][head, ids] = in_host(landed).reshape(shape)

    def _buffer(
        self, data: KvBytes, num_layers: int, num_heads: int, num_blocks: int
    ) -> npt.NDArray[np.uint8]:
        where = self._where
        outer = [axis.count for axis in where.outer]
        return in_host(data).reshape(num_layers, num_heads, num_blocks, *outer, where.run_bytes)


def _by_head(cache: torch.Tensor, where: HeadBlocks) -> npt.NDArray[Any]:
    """A writable view [head, block, outer axes..., bytes of a run] of the cache's memory."""
    num_items = cache.untyped_storage().nbytes() // cache.element_size() - cache.storage_offset()
    memory = cache.as_strided((num_items,), (1,)).view(torch.uint8).numpy()
    axes = (where.heads, where.blocks, *where.outer)
    shape = [*(axis.count for axis in axes), where.run_bytes]
    strides = [*(axis.stride for axis in axes), 1]
    return np.lib.stride_tricks.as_strided(memory, shape, strides)
