"""Reads a model's cache groups from vLLM's specifications of its KV caches.

A cache group is a set of layers that need the same share of a text: all of it, or a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from pdmesh.core.kv.layout.cache_groups import STATE_WINDOW, CacheGroups
from pdmesh.engine.vllm.connector.refusal import CannotMoveKv

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_ALIGN: Final = "align"  # vLLM's mode that keeps a request's state in the block of its last token
_REMEDY = "engine_args.disable_hybrid_kv_cache_manager may make its layers alike"


def groups_of(config: KVCacheConfig, block_size: int) -> CacheGroups:
    """The model's cache groups, whose blocks must all have `block_size` tokens.

    Raises CannotMoveKv if a group has blocks of another size, or KV that the mesh cannot move.
    """
    windows: list[int] = []
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        if spec.block_size != block_size:
            raise CannotMoveKv(
                f"a cache group of this model has blocks of {spec.block_size} tokens, another of "
                f"{block_size}: {_REMEDY}"
            )
        windows.append(_window(spec))
    return CacheGroups(block_size, tuple(windows))


def group_of_layers(config: KVCacheConfig) -> dict[str, int]:
    return {
        name: number
        for number, group in enumerate(config.kv_cache_groups)
        for name in group.layer_names
    }


def state_specs(config: KVCacheConfig) -> dict[str, MambaSpec]:
    """The specifications of layers that keep one state instead of KV for each token.

    The layers are in vLLM's order.
    """
    found: dict[str, MambaSpec] = {}
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        each = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
        for name in group.layer_names:
            if isinstance(own := each.get(name, spec), MambaSpec):
                found[name] = own
    return found


def with_state_pages(
    kv_caches: Mapping[str, torch.Tensor], specs: Mapping[str, MambaSpec]
) -> dict[str, torch.Tensor]:
    """For each layer that keeps a state, replaces the cache by whole blocks, uint8 [blocks, bytes].

    vLLM pads a state to the size of other layers' blocks. The padding travels with the state, so
    that all layers have blocks of one size.
    """
    return {
        name: _pages(cache, specs[name].page_size_bytes) if name in specs else cache
        for name, cache in kv_caches.items()
    }


def states_text(specs: Mapping[str, MambaSpec]) -> str:
    """Describes the blocks of layers that keep a state. Equal texts mean equal layouts."""
    return "; ".join(
        f"{name} {spec.mamba_type.name} {spec.shapes} {spec.dtypes}"
        for name, spec in sorted(specs.items())
    )


def _pages(cache: torch.Tensor, page_bytes: int) -> torch.Tensor:
    """The cache's blocks with their padding. `cache` is [blocks, ...], within one allocation."""
    item = cache.element_size()
    memory = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
    shape, strides = (cache.shape[0], page_bytes), (cache.stride(0) * item, 1)
    return memory.as_strided(shape, strides, cache.storage_offset() * item)


def _state_window(spec: MambaSpec) -> int:
    if spec.mamba_cache_mode != _ALIGN:
        raise CannotMoveKv(
            f"the mesh moves states (here {spec.mamba_type.name}) only in vLLM's mode {_ALIGN}, "
            f"not {spec.mamba_cache_mode}: set engine_args.mamba_cache_mode"
        )
    if spec.num_speculative_blocks:
        raise CannotMoveKv(
            f"the mesh moves no states (here {spec.mamba_type.name}) with speculation, where the "
            "last accepted token's state may be in any of several blocks"
        )
    return STATE_WINDOW


def _window(spec: KVCacheSpec) -> int:
    """The number of trailing tokens whose KV a layer needs. 0 means all tokens.

    The exact class of `spec` is compared, because subclasses store something else.
    """
    if isinstance(spec, UniformTypeKVCacheSpecs):
        (window,) = {_window(each) for each in spec.kv_cache_specs.values()}
        return window
    if type(spec) is MambaSpec:
        return _state_window(spec)
    if type(spec) is MLAAttentionSpec and spec.tokens_per_state != 1:
        raise CannotMoveKv(
            "the mesh moves no KV of latent attention (MLA) that keeps one state for "
            f"{spec.tokens_per_state} tokens: a prompt may end within a state"
        )
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        return 0
    if type(spec) is SlidingWindowSpec:
        return int(spec.sliding_window + spec.extra_retained_tokens)
    raise CannotMoveKv(f"the mesh moves no KV of vLLM's {type(spec).__name__}: {_REMEDY}")
