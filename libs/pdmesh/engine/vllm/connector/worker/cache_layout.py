"""Finds out how vLLM laid out a rank's KV cache, and whether its blocks can be split by heads.

Engines with different numbers of ranks can exchange KV only if blocks can be split by heads. On a
GPU, the tensor's shape shows the axes of a block, in whichever order they lie in memory. On a CPU,
vLLM's kernels pack K and V of a head into one piece, differently for each instruction set. The mesh
moves such a piece without looking into it, but can still separate the heads. Latent attention (MLA)
has one head, of which every rank has a copy. Any other block is opaque: it moves whole, and only
between engines with equal numbers of ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pdmesh.core.kv.layout.head_blocks import (
    Axis,
    HeadBlocks,
    head_blocks,
    opaque_blocks,
    travel_shape,
)
from pdmesh.engine.vllm.model.fingerprint import digest, machine_kernels

_DIGEST_CHARS = 12


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """One layout for all layers of a rank. An opaque block cannot be split by heads."""

    where: HeadBlocks
    block: str  # digest of a block's inner layout during a transfer
    is_opaque: bool


def read_layout(
    kv_caches: Mapping[str, torch.Tensor],
    num_blocks: int,
    num_heads: int,
    *,
    is_packed: bool,
    kernels: str = "",
    is_stage: bool = False,
) -> CacheLayout:
    """The layout that all layers of a rank share. `num_heads` is this rank's number of KV heads.

    `is_packed` means that the attention kernels decide the order within a head's block. `kernels`
    names these kernels. `is_stage` means that other ranks have other layers. In this case the
    digest includes neither the names nor the number of this rank's layers. Raises ValueError if the
    layers have no common layout, or if a layer's blocks are not contiguous.
    """
    caches = list(kv_caches.values())
    count = "stage" if is_stage else str(len(caches))
    if is_packed:
        heads = packed_heads(caches, num_blocks, num_heads, (kernels, count))
        return heads or _opaque(kv_caches, num_blocks, kernels, is_stage=is_stage)
    axes = known_axes(tuple(caches[0].shape), num_blocks, num_heads)
    has_states = len({cache.ndim for cache in caches}) > 1  # some keep a state, not KV
    if axes is None or has_states:
        return _opaque(kv_caches, num_blocks, kernels, is_stage=is_stage)
    item = caches[0].element_size()
    layouts = {head_blocks(axes, c.shape, c.stride(), item) for c in caches}
    if len(layouts) != 1:
        raise ValueError("the layers' caches have different layouts")
    (where,) = layouts
    travels = travel_shape(axes, caches[0].shape, item)
    return CacheLayout(where, _digest("heads", count, *map(str, travels)), is_opaque=False)


def with_windows(block: str, windows: Sequence[int]) -> str:
    """The digest of a layout whose layers send only the KV of these windows. 0 means all tokens."""
    return _digest(block, *map(str, windows)) if any(windows) else block


def known_axes(shape: tuple[int, ...], num_blocks: int, num_heads: int) -> str | None:
    """The axes of a GPU cache, by the letters of `core.kv.layout.head_blocks`.

    None for a shape that vLLM's attention kernels do not use.
    """
    match shape:
        case (blocks, heads, _, _) if (blocks, heads) == (num_blocks, num_heads):
            return "bhnc"
        case (2, blocks, _, heads, _) if (blocks, heads) == (num_blocks, num_heads):
            return "kbnhc"
        case (blocks, 2, _, heads, _) if (blocks, heads) == (num_blocks, num_heads):
            return "bknhc"
    return None


def packed_heads(
    caches: Sequence[torch.Tensor], num_blocks: int, num_heads: int, named: tuple[str, str]
) -> CacheLayout | None:
    """The layout of caches of shape [blocks, heads, ...], with each head's block in one piece.

    None if the caches differ or have another shape. `named` holds two texts for the digest: the
    names of the kernels, and the number of layers.
    """
    shape = tuple(caches[0].shape)
    if shape[:2] != (num_blocks, num_heads) or len({c.dtype for c in caches}) != 1:
        return None
    if any(tuple(c.shape) != shape or not c.is_contiguous() for c in caches):
        return None
    inner = shape[2:]
    head_bytes = math.prod(inner) * caches[0].element_size()
    where = HeadBlocks(
        Axis(num_blocks, num_heads * head_bytes), Axis(num_heads, head_bytes), (), head_bytes
    )
    kind = machine_kernels(_device_kind(caches[0]))
    parts = (*named, str(caches[0].dtype), *map(str, inner))
    return CacheLayout(where, _digest("packed heads", kind, *parts), is_opaque=False)


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


def _opaque(
    kv_caches: Mapping[str, torch.Tensor], num_blocks: int, kernels: str, *, is_stage: bool
) -> CacheLayout:
    sizes = {block_rows(cache, num_blocks).shape[1] for cache in kv_caches.values()}
    if len(sizes) != 1:
        raise ValueError("the layers' blocks differ in size")
    parts: list[str] = []
    for name, cache in kv_caches.items():
        blocks = [d for d in range(cache.ndim) if cache.shape[d] == num_blocks]
        shape = [s for d, s in enumerate(cache.shape) if d not in blocks[:1]]
        order = sorted(range(cache.ndim), key=lambda d: (-cache.stride(d), -cache.shape[d]))
        parts.append(f"{any_layer(name) if is_stage else name} {cache.dtype} {shape} {order}")
    if is_stage:
        parts = sorted(set(parts))
    kind = machine_kernels(_device_kind(next(iter(kv_caches.values()))))
    block = _digest(kind, kernels, *parts)
    return CacheLayout(opaque_blocks(num_blocks, sizes.pop()), block, is_opaque=True)


def any_layer(name: str) -> str:
    """Replaces the numbers of layers by # in a layer's name, or in a text with several names."""
    return re.sub(r"\b\d+\b", "#", name)


def _device_kind(cache: torch.Tensor) -> str:
    device = cache.device
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def _digest(*parts: str) -> str:
    return digest(parts)[:_DIGEST_CHARS]
