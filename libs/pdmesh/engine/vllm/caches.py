"""vLLM's paged KV cache as whole opaque blocks: the inside of a block is the kernel's own business.

On a CPU the cache is plain memory and blocks are copied by numpy. On a GPU a layer's blocks are selected
there and copied as one piece. Layer order is that of registration, the same on every rank and instance
of one fingerprint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from pdmesh.engine.vllm.fingerprint import digest, machine_kernels
from pdmesh.kv.scatter import HostBlocks
from pdmesh.kv.transport import ByteArray


class PagedCaches(Protocol):
    num_layers: int
    block_bytes: int  # of one layer

    def gather(self, block_ids: Sequence[int], out: ByteArray) -> None:
        """All layers of the blocks into `out`, layer by layer. Complete when this returns."""
        ...

    def scatter(self, source: ByteArray, block_ids: Sequence[int]) -> None:
        """The inverse of `gather`. Complete when this returns."""
        ...


def block_rows(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """A layer's cache as [num_blocks, bytes of a block], without a copy, in the order of memory.

    Raises ValueError if a block's bytes do not lie together.
    """
    order = sorted(range(cache.ndim), key=lambda d: (-cache.stride(d), -cache.shape[d]))
    dense = cache.permute(order)
    if not dense.is_contiguous() or dense.shape[0] != num_blocks:
        raise ValueError(
            f"a KV cache of shape {tuple(cache.shape)} and strides {cache.stride()} does not keep "
            f"each of its {num_blocks} blocks in one piece"
        )
    return dense.view(num_blocks, -1).view(torch.uint8)


def layout_signature(kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> str:
    """What must be equal at both ends besides the model: a block's shape, its order in memory, the kernels."""
    parts: list[str] = []
    for name, cache in kv_caches.items():
        blocks = [d for d in range(cache.ndim) if cache.shape[d] == num_blocks]
        shape = [s for d, s in enumerate(cache.shape) if d not in blocks[:1]]
        order = sorted(range(cache.ndim), key=lambda d: (-cache.stride(d), -cache.shape[d]))
        parts.append(f"{name} {cache.dtype} {shape} {order}")
    device = next(iter(kv_caches.values())).device
    kind = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    return digest([machine_kernels(kind), *parts])


def paged_caches(kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> PagedCaches:
    rows = [block_rows(cache, num_blocks) for cache in kv_caches.values()]
    if len({r.shape[1] for r in rows}) != 1:
        raise ValueError("the layers' blocks differ in size")
    return HostCaches(rows) if rows[0].device.type == "cpu" else DeviceCaches(rows)


class HostCaches:
    def __init__(self, rows: Sequence[torch.Tensor]) -> None:
        self._blocks = HostBlocks([r.numpy() for r in rows])
        self.num_layers = len(rows)
        self.block_bytes = int(rows[0].shape[1])

    def gather(self, block_ids: Sequence[int], out: ByteArray) -> None:
        self._blocks.gather(block_ids, out)

    def scatter(self, source: ByteArray, block_ids: Sequence[int]) -> None:
        self._blocks.scatter(source, block_ids)


class DeviceCaches:
    """On the stream of the caller, which is the model's: ordered with the step that wrote the blocks."""

    def __init__(self, rows: Sequence[torch.Tensor]) -> None:
        self._rows = rows
        self.num_layers = len(rows)
        self.block_bytes = int(rows[0].shape[1])

    def gather(self, block_ids: Sequence[int], out: ByteArray) -> None:
        index = torch.as_tensor(block_ids, device=self._rows[0].device)
        target = torch.from_numpy(self._by_layer(out, len(block_ids)))
        for layer, rows in enumerate(self._rows):
            target[layer].copy_(rows.index_select(0, index), non_blocking=True)
        torch.cuda.current_stream().synchronize()

    def scatter(self, source: ByteArray, block_ids: Sequence[int]) -> None:
        device = self._rows[0].device
        index = torch.as_tensor(block_ids, device=device)
        landed = torch.from_numpy(self._by_layer(source, len(block_ids)))
        for layer, rows in enumerate(self._rows):
            rows.index_copy_(0, index, landed[layer].to(device, non_blocking=True))
        torch.cuda.current_stream().synchronize()

    def _by_layer(
        self, data: ByteArray, num_blocks: int
    ) -> np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]:
        return data.reshape(self.num_layers, num_blocks, self.block_bytes)
