"""An engine draws the same tokens with the mesh's weight loader as with vLLM's loader."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdmesh.core.loading.weights_loader import WeightsLoader
from pdmesh.engine.base import Sampling
from pdmesh.engine.vllm.config import VllmConfig
from tests.e2e.engine.test_alone import generate_alone
from tests.e2e.pair import Pair, running
from tests.fakes.tiny_llama import write_tiny_llama

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
]
PROMPTS = [(5, 17, 900, 23, 4000, 77), tuple(range(100, 180))]


async def drawn(model: Path, loader: WeightsLoader) -> list[list[int]]:
    config = VllmConfig(
        f"fusion-{loader.value.replace('_', '-')}",
        1,
        model,
        "tiny",
        dtype="float32",
        block_size=32,
        kv_cache_bytes=64 << 20,
        staging_bytes=8 << 20,
        landing_bytes=8 << 20,
        max_model_len=256,
        weights_loader=loader,
    )
    async with running(config) as host:
        pair = Pair(host, host)
        return [await generate_alone(pair, host, each, Sampling(8)) for each in PROMPTS]


@pytest.mark.req("S84", "S88")
async def test_an_engine_with_our_loader_draws_what_it_draws_with_vllms(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model", max_shard_size="12MB")
    other = write_tiny_llama(tmp_path / "other", seed=1, max_shard_size="12MB")
    ours = await drawn(model, WeightsLoader.FILE_ORDER)
    assert ours == await drawn(model, WeightsLoader.VLLM)
    assert ours != await drawn(other, WeightsLoader.FILE_ORDER)
