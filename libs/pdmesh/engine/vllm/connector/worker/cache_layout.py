"""How vLLM laid out a rank's KV cache: separable heads on a GPU, opaque blocks on a CPU.

vLLM's CPU kernels pack K and V within a block, differently for each instruction set. So on a CPU a
block is opaque and moves whole. On a GPU the tensor shows the axes of a block, whatever their order
in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pdmesh.core.kv.layout.head_blocks import (
    HeadBlocks,
    head_blocks,
    opaque_blocks,
    travel_shape,
)
from pdmesh.engine.vllm.model.fingerprint import digest, machine_kernels

_DIGEST_CHARS = 12


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """One layout for all layers of a rank."""

    where: HeadBlocks
    block: str  # digest of a block's inner layout as it travels
    is_opaque: bool


def read_layout(
    kv_caches: Mapping[str, torch.Tensor],
    num_blocks: int,
    num_heads: int,
    *,
    is_opaque: bool,
    kernels: str = "",
) -> CacheLayout:
    """`num_heads` are this rank's; `kernels` names the kernels that lay out an opaque block.

    Raises ValueError if layers differ, or if a layer's blocks are not contiguous.
    """
    caches = list(kv_caches.values())
    axes = None if is_opaque else known_axes(tuple(caches[0].shape), num_blocks, num_heads)
    if axes is None:
        return _opaque(kv_caches, num_blocks, kernels)
    item = caches[0].element_size()
    layouts = {head_blocks(axes, c.shape, c.stride(), item) for c in caches}
    if len(layouts) != 1:
        raise ValueError("the layers' caches have different layouts")
    (where,) = layouts
    travels = travel_shape(axes, caches[0].shape, item)
    return CacheLayout(where, _digest("heads", *map(str, (len(caches), *travels))), is_opaque=False)


def with_windows(block: str, windows: Sequence[int]) -> str:
    """The digest of a layout whose layers send only these windows; 0: all tokens."""
    return _digest(block, *map(str, windows)) if any(windows) else block


def known_axes(shape: tuple[int, ...], num_blocks: int, num_heads: int) -> str | None:
    """The axes of a GPU cache, if its shape is one that vLLM's attention kernels use; or None."""
    match shape:
        case (blocks, heads, _, _) if (blocks, heads) == (num_blocks, num_heads):
            return "bhnc"
        case (2, blocks, _, heads, _) if (blocks, heads) == (num_blocks, num_heads):
            return "kbnhc"
        case (blocks, 2, _, heads, _) if (blocks, heads) == (num_blocks, num_heads):
            return "bknhc"
    return None


def block_rows(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """A layer's cache as [num_blocks, bytes of a block], without a copy, in memory order.

    Raises ValueError if a block's bytes are not contiguous.
    """
    order = sorted(range(cache.ndim), key=lambda d: (-cache.stride(d), -cache.shape[d]))
    dense = cache.permute(order)
    if not dense.is_contiguous() or dense.shape[0] != num_blocks:
        raise ValueError(
            f"a KV cache of shape {tuple(cache.shape)} and strides {cache.stride()} does not keep "
            f"each of its {num_blocks} blocks in one piece"
        )
    return dense.view(num_blocks, -1).view(torch.uint8)


def _opaque(kv_caches: Mapping[str, torch.Tensor], num_blocks: int, kernels: str) -> CacheLayout:
    sizes = {block_rows(cache, num_blocks).shape[1] for cache in kv_caches.values()}
    if len(sizes) != 1:
        raise ValueError("the layers' blocks differ in size")
    parts: list[str] = []
    for name, cache in kv_caches.items():
        blocks = [d for d in range(cache.ndim) if cache.shape[d] == num_blocks]
        shape = [s for d, s in enumerate(cache.shape) if d not in blocks[:1]]
        order = sorted(range(cache.ndim), key=lambda d: (-cache.stride(d), -cache.shape[d]))
        parts.append(f"{name} {cache.dtype} {shape} {order}")
    device = next(iter(kv_caches.values())).device
    kind = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    block = _digest(machine_kernels(kind), kernels, *parts)
    return CacheLayout(opaque_blocks(num_blocks, sizes.pop()), block, is_opaque=True)


def _digest(*parts: str) -> str:
    return digest(parts)[:_DIGEST_CHARS]
