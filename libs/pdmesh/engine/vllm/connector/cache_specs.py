"""Reads a model's cache groups from vLLM's specifications of its KV caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from pdmesh.core.kv.layout.cache_groups import CacheGroups
from pdmesh.engine.vllm.connector.refusal import CannotMoveKv

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_REMEDY = "engine_args.disable_hybrid_kv_cache_manager may make its layers alike"


def groups_of(config: KVCacheConfig, block_size: int) -> CacheGroups:
    """Raises CannotMoveKv that names a kind of cache that the mesh cannot move."""
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


def _window(spec: KVCacheSpec) -> int:
    """How many tokens of a text a layer needs; 0: all.

    Subclasses of these specifications keep something else, so the exact class counts.
    """
    if isinstance(spec, UniformTypeKVCacheSpecs):
        (window,) = {_window(each) for each in spec.kv_cache_specs.values()}
        return window
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
