"""Implements `PagedCaches` for vLLM's paged KV cache on a GPU, with the copies of `kv.device`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdmesh.core.kv.layout.head_blocks import HeadBlocks
from pdmesh.engine.vllm.connector.worker.caches import OnDone, Span, part_rows
from pdmesh.kv.device.copies import DeviceCopies
from pdmesh.kv.device.operators import DeviceBlocks
from pdmesh.kv.transport.base import KvBytes


class DeviceCaches:
    def __init__(self, caches: Sequence[torch.Tensor], where: HeadBlocks) -> None:
        self._copies = DeviceCopies(DeviceBlocks(caches, where), caches[0].device)
        self._where = where
        self.num_layers, self.num_heads = len(caches), where.heads.count
        self.block_bytes = where.block_bytes
        self._device = caches[0].device

    def wait_for_model(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def gather(self, block_ids: Sequence[int], out: KvBytes, on_done: OnDone = None) -> None:
        self._copies.gather(block_ids, out, (0, self.num_layers), on_done)

    def gather_layer(
        self, layer: int, block_ids: Sequence[int], out: KvBytes, on_done: OnDone = None
    ) -> None:
        self._copies.gather(block_ids, out, (layer, 1), on_done)

    def scatter(
        self,
        source: KvBytes,
        block_ids: Sequence[int],
        on_done: OnDone = None,
        heads: Span | None = None,
    ) -> None:
        self._copies.scatter(source, block_ids, heads or (0, self.num_heads), on_done)

    def scatter_part(
        self, data: KvBytes, offset: int, block_ids: Sequence[int], heads: Span | None = None
    ) -> None:
        self.scatter_layer(0, data, offset, block_ids, heads)

    def scatter_layer(
        self,
        layer: int,
        data: KvBytes,
        offset: int,
        block_ids: Sequence[int],
        heads: Span | None = None,
    ) -> None:
        num_heads = heads[1] if heads else self.num_heads
        layer_bytes = len(block_ids) * num_heads * self._where.head_bytes
        if offset % layer_bytes == 0 and data.size % layer_bytes == 0:
            layers = layer + offset // layer_bytes, data.size // layer_bytes
            self._copies.scatter_now(data, block_ids, layers, heads)
            return
        rows_of = part_rows(self._where, data, offset, len(block_ids), heads)
        for later, head, first, rows in rows_of:
            ids = block_ids[first : first + rows.size // self._where.head_bytes]
            self._copies.scatter_now(rows, ids, (layer + later, 1), (head, 1))
