"""Gather and RecvScatter on a GPU: copy KV blocks of all layers in one kernel launch (S50).

Gather copies from the engine's paged blocks to a contiguous buffer, and RecvScatter copies back.
The buffer is laid out as [layer][head][block][head's bytes], and contains only the requested heads.
The functions `cache_word` and `buffer_word` compute the addresses. They are plain arithmetic that
Triton compiles, and that tests run on arrays. The kernel moves the widest words that divide every
stride. torch and Triton are imported only if there is a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pdmesh.core.kv.layout.head_blocks import HeadBlocks
from pdmesh.kv.device.words import word_plan

if TYPE_CHECKING:
    import torch


class DeviceBlocks:
    """The paged caches of all layers on one device. All layers have the same layout.

    A call queues a launch on the caller's current stream and returns. Block ids and buffers are
    tensors on the device of the caches.
    """

    def __init__(self, caches: Sequence[torch.Tensor], where: HeadBlocks) -> None:
        import torch

        from pdmesh.kv.device import kernels as device_kernels

        self._kernels = device_kernels
        self._plan = word_plan(where)
        self.where = where
        self.num_layers = len(caches)
        self._caches = list(caches)  # keeps the memory of the pointers alive
        pointers = [cache.data_ptr() for cache in caches]
        if any(p % self._plan.word_bytes for p in pointers):
            raise ValueError("a cache begins between two words")
        self._pointers = torch.tensor(pointers, dtype=torch.int64, device=caches[0].device)

    def buffer_bytes(self, num_blocks: int, num_layers: int, num_heads: int) -> int:
        return num_layers * num_heads * num_blocks * self.where.head_bytes

    def gather(
        self,
        block_ids: torch.Tensor,
        out: torch.Tensor,
        layers: tuple[int, int] | None = None,
        heads: tuple[int, int] | None = None,
    ) -> None:
        """Copy blocks into `out` (uint8).

        `layers` and `heads` are (first, count), and by default all. Raises ValueError if they
        exceed the caches, or if `out` has another size or is not contiguous.
        """
        self._move(block_ids, out, layers, heads, is_gather=True)

    def scatter(
        self,
        source: torch.Tensor,
        block_ids: torch.Tensor,
        layers: tuple[int, int] | None = None,
        heads: tuple[int, int] | None = None,
    ) -> None:
        """The inverse of `gather`."""
        self._move(block_ids, source, layers, heads, is_gather=False)

    def _move(
        self,
        block_ids: torch.Tensor,
        buffer: torch.Tensor,
        layers: tuple[int, int] | None,
        heads: tuple[int, int] | None,
        *,
        is_gather: bool,
    ) -> None:
        first_layer, num_layers = layers or (0, self.num_layers)
        first_head, num_heads = heads or (0, self.where.heads.count)
        num_blocks = len(block_ids)
        expected = self.buffer_bytes(num_blocks, num_layers, num_heads)
        if buffer.numel() != expected or not buffer.is_contiguous():
            raise ValueError(f"{num_blocks} blocks need {expected} bytes, not {buffer.numel()}")
        if first_layer + num_layers > self.num_layers:
            asked = f"{num_layers} layers from layer {first_layer} on"
            raise ValueError(f"{asked} exceed {self.num_layers} layers")
        if first_head + num_heads > self.where.heads.count:
            asked = f"{num_heads} heads from head {first_head} on"
            raise ValueError(f"{asked} exceed {self.where.heads.count} heads")
        if expected:
            self._kernels.move(
                self._pointers[first_layer : first_layer + num_layers],
                block_ids,
                buffer,
                self._plan,
                first_head,
                num_heads,
                is_gather=is_gather,
            )
