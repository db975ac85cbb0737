"""Latent attention (MLA) in vLLM: KV has one head, and every rank has a copy of it.

vLLM's own function makes the caches from the specification. tests/e2e/caches/test_latent.py runs a
model of this kind.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM's specifications")
pytestmark = pytest.mark.filterwarnings("default")  # vLLM itself raises these warnings

import torch  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    create_kv_cache_views,
)

from pdmesh.core.instance.arena import ArenaRange  # noqa: E402
from pdmesh.core.kv.layout.compatibility import may_meet  # noqa: E402
from pdmesh.core.kv.layout.rank_place import RankPlace  # noqa: E402
from pdmesh.core.kv.transfer.ticket import Ticket  # noqa: E402
from pdmesh.engine.vllm.connector.cache_specs import groups_of  # noqa: E402
from pdmesh.engine.vllm.connector.kv_facts import kv_facts  # noqa: E402
from pdmesh.engine.vllm.connector.worker.cache_choice import paged_caches  # noqa: E402
from pdmesh.engine.vllm.connector.worker.cache_layout import CacheLayout, read_layout  # noqa: E402
from pdmesh.engine.vllm.connector.worker.caches import layout_of  # noqa: E402
from pdmesh.engine.vllm.connector.worker.piece_pulls import Share  # noqa: E402
from tests.unit.engine.vllm.connector.test_kv_facts import vllm_config  # noqa: E402

NUM_BLOCKS, BLOCK_SIZE, NUM_LAYERS = 6, 16, 2
SPEC = MLAAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


def caches_of(spec: MLAAttentionSpec) -> dict[str, Any]:
    """The cache of each layer, made as vLLM's model runner does."""
    made = {}
    for layer in range(NUM_LAYERS):
        raw = torch.zeros(NUM_BLOCKS * spec.page_size_bytes, dtype=torch.int8)
        name = f"layer.{layer}"
        where = SimpleNamespace(
            layers=[[name]], layer_stride=raw.numel(), block_stride=spec.page_size_bytes, offset=0
        )
        tensor: KVCacheTensor = where
        (made[name],) = create_kv_cache_views(
            raw, spec, NUM_BLOCKS, KVCacheLayout.LBNHC, tensor, spec.block_size
        )
    return made


def layout(spec: MLAAttentionSpec = SPEC) -> CacheLayout:
    return read_layout(caches_of(spec), NUM_BLOCKS, 1, is_packed=False)


def ticket(num_ranks: int) -> Ticket:
    addresses = tuple(f"rank-{rank}" for rank in range(num_ranks))
    return Ticket("t", "r", 0, "p", 1, "m", 32, 4096, addresses, 20_000)


@pytest.mark.req("S57", "S119")
def test_its_blocks_have_one_head_so_any_numbers_of_ranks_may_meet() -> None:
    found = layout()
    assert not found.is_opaque
    assert found.where.heads.count == 1
    assert found.where.block_bytes == SPEC.page_size_bytes
    facts = kv_facts(mla_config(), [])
    assert facts.num_heads == 1, "not the heads of the model's configuration"
    for ours, theirs in ((1, 8), (8, 1), (2, 4), (8, 8)):
        assert may_meet(f"m.bfloat16.unscaled.b16.{found.block}.heads1", ours, theirs)


def mla_config() -> Any:
    config = vllm_config("auto")
    config.model_config.use_mla = True
    return config


@pytest.mark.req("S57", "S119")
@pytest.mark.parametrize(("num_sources", "num_ranks"), [(1, 4), (4, 1), (2, 4), (4, 2), (4, 4)])
def test_each_rank_pulls_the_whole_from_one_rank_and_every_source_hears_of_it(
    num_sources: int, num_ranks: int
) -> None:
    told: dict[int, int] = dict.fromkeys(range(num_sources), 0)
    takers: dict[int, set[int]] = {source: set() for source in range(num_sources)}
    for rank in range(num_ranks):
        wanted = Share(1, RankPlace(rank, num_ranks)).pieces(
            ticket(num_sources), ArenaRange(0, 4096), 4096
        )
        bringing = [piece for piece in wanted if piece.count]
        assert [piece.num_bytes for piece in bringing] == [4096], "a rank takes one copy"
        for piece in wanted:
            told[piece.source_rank] += 1
            takers[piece.source_rank].add(piece.num_takers)
    for source, count in told.items():
        assert takers[source] == {count}, "a source waits for as many takers as come"


@pytest.mark.req("S50", "S57")
def test_blocks_arrive_bit_for_bit() -> None:
    source, target = caches_of(SPEC), caches_of(SPEC)
    rng = np.random.default_rng(1)
    for cache in source.values():
        data = torch.from_numpy(rng.integers(-128, 128, tuple(cache.shape), np.int8))
        cache.copy_(data)
    found = layout()
    out, into = (paged_caches(caches, found, NUM_BLOCKS) for caches in (source, target))
    buffer = np.zeros(layout_of(out, 3, "").total_bytes, np.uint8)
    out.gather([4, 0, 2], buffer)
    into.scatter_part(buffer, 0, [1, 5, 3], (0, 1))
    for name, cache in source.items():
        assert torch.equal(target[name][[1, 5, 3]], cache[[4, 0, 2]])


@pytest.mark.req("S126")
def test_what_keeps_no_state_for_each_token_is_refused_in_one_line() -> None:
    compressed = MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, tokens_per_state=4
    )
    windowed = SlidingWindowMLASpec(
        block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, sliding_window=128
    )
    for spec, why in (
        (compressed, "latent attention (MLA) that keeps one state for 4 tokens"),
        (windowed, "SlidingWindowMLASpec"),
    ):
        config = KVCacheConfig(
            num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], spec)]
        )
        with pytest.raises(ValueError, match="moves no KV") as refused:
            groups_of(config, 16)
        assert why in str(refused.value)
        assert "\n" not in str(refused.value)


@pytest.mark.req("S126")
def test_an_indexer_s_cache_beside_it_is_refused() -> None:
    """Sparse attention (DeepSeek V3.2) keeps its index in layers of another size."""
    index = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=132, dtype=torch.uint8)
    caches = {**caches_of(SPEC), "index": caches_of(index)["layer.0"]}
    with pytest.raises(ValueError, match="different layouts"):
        read_layout(caches, NUM_BLOCKS, 1, is_packed=False)
