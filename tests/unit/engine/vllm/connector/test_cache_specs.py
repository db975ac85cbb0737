"""A model's cache groups are read from vLLM's specification.

Groups that the mesh cannot move are refused.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("vllm", reason="needs vLLM's specifications")
pytestmark = pytest.mark.filterwarnings("default")  # vLLM itself raises these warnings

import numpy as np  # noqa: E402
import torch  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    create_kv_cache_views,
)

from pdmesh.core.kv.layout.cache_groups import STATE_WINDOW, CacheGroups  # noqa: E402
from pdmesh.engine.vllm.connector.cache_specs import (  # noqa: E402
    group_of_layers,
    groups_of,
    state_specs,
    states_text,
    with_state_pages,
)
from pdmesh.engine.vllm.connector.worker.cache_choice import paged_caches  # noqa: E402
from pdmesh.engine.vllm.connector.worker.cache_layout import read_layout  # noqa: E402
from pdmesh.engine.vllm.connector.worker.group_caches import GroupCaches  # noqa: E402

SIZES: dict[str, Any] = {  # the values are numbers and a dtype
    "block_size": 16,
    "num_kv_heads": 2,
    "head_size": 64,
    "dtype": torch.float32,
}
FULL = FullAttentionSpec(**SIZES)
WINDOW = SlidingWindowSpec(**SIZES, sliding_window=100)
PAGE_BYTES = FULL.page_size_bytes
STATE = MambaSpec(
    block_size=16,
    shapes=((3, 8), (2, 4, 4)),
    dtypes=(torch.bfloat16, torch.float32),
    page_size_padded=PAGE_BYTES,
    mamba_cache_mode="align",
)


def config(*specs: Any) -> KVCacheConfig:
    """A cache configuration in which group n has the layers 2 n and 2 n + 1."""
    groups = [KVCacheGroupSpec([f"{2 * n}", f"{2 * n + 1}"], spec) for n, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.mark.parametrize(
    ("specs", "windows"),
    [
        ([FULL], (0,)),
        ([WINDOW], (100,)),
        ([WINDOW, FULL, WINDOW], (100, 0, 100)),
        ([SlidingWindowSpec(**SIZES, sliding_window=100, extra_retained_tokens=3)], (103,)),
        # vLLM's hybrid cache manager is off
        ([FullAttentionSpec(**SIZES, sliding_window=100)], (0,)),
        ([MLAAttentionSpec(**{**SIZES, "num_kv_heads": 1})], (0,)),
        ([STATE, FULL, WINDOW], (STATE_WINDOW, 0, 100)),
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


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"mamba_cache_mode": "all"}, r"moves states \(here MAMBA2\) only in vLLM's mode align"),
        ({"num_speculative_blocks": 2}, r"moves no states \(here MAMBA2\) with speculation"),
    ],
)
def test_a_state_that_may_lie_elsewhere_is_refused_in_one_line(
    change: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        groups_of(config(replace(STATE, **change), FULL), 16)
    assert "\n" not in str(refused.value)


def test_blocks_of_a_state_are_seen_whole_with_the_padding_up_to_other_layers_blocks() -> None:
    """vLLM's view of a layer does not show the padding. All layers of the state share one
    allocation.
    """
    found = config(STATE, FULL)
    memory = torch.arange(4 * 8 * PAGE_BYTES, dtype=torch.int64).to(torch.int8)
    at = SimpleNamespace(
        layers=["0", "1"], layer_stride=8 * PAGE_BYTES, block_stride=PAGE_BYTES, offset=0
    )
    views = create_kv_cache_views(memory, STATE, 8, KVCacheLayout.LBNHC, cast(Any, at), 16)
    full = torch.zeros(8, 2, 16, 128)
    specs = state_specs(found)
    seen = with_state_pages({"0": views[0], "2": full, "1": views[1]}, specs)
    assert list(seen) == ["0", "2", "1"], "in the order of the model"
    assert seen["2"] is full
    for name, start in (("0", 0), ("1", 8 * PAGE_BYTES)):
        pages = memory[start : start + 8 * PAGE_BYTES].view(torch.uint8).view(8, PAGE_BYTES)
        assert torch.equal(seen[name], pages)
    seen["1"][3, 5] = 77
    assert memory[8 * PAGE_BYTES + 3 * PAGE_BYTES + 5] == 77, "it is the cache, not a copy"


def test_states_of_another_shape_or_number_format_are_another_kind_of_kv() -> None:
    texts = {
        states_text(state_specs(config(spec, FULL)))
        for spec in (
            STATE,
            replace(STATE, shapes=((3, 8), (2, 4, 8))),
            replace(STATE, dtypes=(torch.bfloat16, torch.bfloat16)),
        )
    }
    assert len(texts) == 3
    assert states_text(state_specs(config(FULL, WINDOW))) == ""


@pytest.mark.req("S120")
@pytest.mark.parametrize("is_packed", [True, False])
# the first is cut by heads, the second is opaque
@pytest.mark.parametrize("shape", [(8, 2, 16, 128), (8, 16, 2, 100)])
def test_all_stages_of_a_pipeline_have_one_layout(shape: tuple[int, ...], is_packed: bool) -> None:
    def stage(first: int, end: int, **more: torch.Tensor) -> dict[str, torch.Tensor]:
        own = {f"model.layers.{n}.self_attn.attn": torch.zeros(shape) for n in range(first, end)}
        return own | more

    def block(caches: dict[str, torch.Tensor], *, is_stage: bool) -> str:
        return read_layout(caches, 8, 2, is_packed=is_packed, is_stage=is_stage).block

    early, late = stage(0, 3), stage(3, 5)
    assert block(early, is_stage=True) == block(late, is_stage=True)
    assert block(early, is_stage=False) != block(late, is_stage=False)
    assert block(early, is_stage=True) != block(early, is_stage=False)
    half = {name: cache.half() for name, cache in early.items()}
    assert block(half, is_stage=True) != block(early, is_stage=True)


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("order", [("state", "full"), ("full", "state")])
def test_blocks_beside_states_are_opaque_and_arrive_bit_for_bit(
    order: tuple[str, str], is_packed: bool
) -> None:
    def made() -> dict[str, torch.Tensor]:
        pages = torch.randint(0, 256, (8, PAGE_BYTES), dtype=torch.uint8)
        full = torch.rand(8, 2, 16, 128)  # [blocks, heads, tokens, K and V]
        return {name: {"state": pages, "full": full}[name] for name in order}

    source, target = made(), made()
    found = read_layout(source, 8, 2, is_packed=is_packed)
    assert (found.is_opaque, found.where.block_bytes) == (True, PAGE_BYTES)
    group_of = [("full", "state").index(name) for name in order]
    out, into = (
        GroupCaches(
            paged_caches(caches, found, 8), CacheGroups(16, (0, STATE_WINDOW)), group_of, "fp"
        )
        for caches in (source, target)
    )
    buffer = np.zeros(out.layout(40).total_bytes, np.uint8)
    assert buffer.size == (3 + 1) * PAGE_BYTES, "three blocks of KV, one state"
    out.gather(((5, 1, 2), (7,)), buffer)
    into.scatter(buffer, ((0, 4, 3), (6,)))
    assert torch.equal(target["full"][[0, 4, 3]], source["full"][[5, 1, 2]])
    assert torch.equal(target["state"][6], source["state"][7])
