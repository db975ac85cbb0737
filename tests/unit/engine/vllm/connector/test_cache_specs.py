"""The cache groups of a model, as vLLM specifies them, and those that the mesh cannot move."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM's specifications")
pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own

import torch  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from pdmesh.core.kv.layout.cache_groups import CacheGroups  # noqa: E402
from pdmesh.engine.vllm.connector.cache_specs import group_of_layers, groups_of  # noqa: E402

SIZES: dict[str, Any] = {  # Any: numbers and a dtype
    "block_size": 16,
    "num_kv_heads": 2,
    "head_size": 64,
    "dtype": torch.float32,
}
FULL = FullAttentionSpec(**SIZES)
WINDOW = SlidingWindowSpec(**SIZES, sliding_window=100)


def config(*specs: Any) -> KVCacheConfig:
    """Group n has the layers 2 n and 2 n + 1."""
    groups = [KVCacheGroupSpec([f"{2 * n}", f"{2 * n + 1}"], spec) for n, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.mark.parametrize(
    ("specs", "windows"),
    [
        ([FULL], (0,)),
        ([WINDOW], (100,)),
        ([WINDOW, FULL, WINDOW], (100, 0, 100)),
        ([SlidingWindowSpec(**SIZES, sliding_window=100, extra_retained_tokens=3)], (103,)),
        ([FullAttentionSpec(**SIZES, sliding_window=100)], (0,)),  # the hybrid manager is off
        ([MLAAttentionSpec(**{**SIZES, "num_kv_heads": 1})], (0,)),
    ],
)
def test_a_group_has_the_window_of_its_layers(specs: list[Any], windows: tuple[int, ...]) -> None:
    found = config(*specs)
    assert groups_of(found, 16) == CacheGroups(16, windows)
    assert group_of_layers(found)[str(2 * len(specs) - 1)] == len(specs) - 1


def test_a_kind_of_cache_that_cannot_move_is_named() -> None:
    chunked = ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=64)
    with pytest.raises(ValueError, match="moves no KV of vLLM's ChunkedLocalAttentionSpec"):
        groups_of(config(FULL, chunked), 16)


def test_groups_with_blocks_of_other_sizes_are_refused() -> None:
    wide = SlidingWindowSpec(**{**SIZES, "block_size": 32}, sliding_window=100)
    with pytest.raises(ValueError, match="blocks of 32 tokens, another of 16"):
        groups_of(config(FULL, wide), 16)
