"""LoRA adapters on pipelines, where each stage has the adapter's parts for its own layers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from pdmesh.core.adapters.adapter import Adapter
from pdmesh.engine.base import Sampling
from tests.e2e.cases import VOCABULARY, Case, differences, generate_all
from tests.e2e.conftest import plain_vllm
from tests.e2e.mesh.test_ranks import BLOCK_SIZE
from tests.e2e.pair import Pair, running
from tests.e2e.pipeline import test_pair as equal
from tests.e2e.pipeline.test_pair import config, idle
from tests.fakes.lora_adapters import write_adapter

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="module"),
]
tiny_llama = equal.tiny_llama  # this is a fixture
LORA: Final[dict[str, Any]] = {"max_adapters": 2, "max_adapter_rank": 8}


@pytest.mark.req("S120", "S1")
async def test_answers_with_an_adapter_are_those_of_plain_vllm(
    tiny_llama: Path, tmp_path: Path
) -> None:
    digest = write_adapter(tmp_path / "one", 1, model=tiny_llama)
    adapter = Adapter("one", digest, str(tmp_path / "one"))
    rng = random.Random(5)
    prompts = [tuple(rng.choices(VOCABULARY, k=n)) for n in (3, 31, 64, 100)]
    asked = [Case(p, 8, adapter=a) for p in prompts for a in (adapter.path, "")]
    with plain_vllm(
        tiny_llama, asked, tmp_path, block_size=BLOCK_SIZE, max_model_len=1024,
        kv_cache_memory_bytes=64 << 20, enable_lora=True, max_loras=3, max_lora_rank=8,
    ) as plain:  # fmt: skip
        todo, expected = plain.decided(asked)
    adapted, bare = expected[::2], expected[1::2]
    assert len(differences(adapted, bare)) > len(prompts) // 2, "the adapter changes answers"
    first, second = (
        replace(config(tiny_llama, name, number), **LORA)
        for name, number in (("prefill-0", 1), ("decode-0", 2))
    )
    async with running(first) as prefill, running(second) as decode:
        pair = Pair(prefill, decode)

        async def generate(prompt: Sequence[int], sampling: Sampling) -> list[int]:
            return await pair.generate(prompt, sampling)

        assert differences(bare, await generate_all(generate, todo[1::2], 4)) == []
        pair.adapter = adapter
        assert differences(adapted, await generate_all(generate, todo[::2], 4)) == []
        assert pair.num_computed_at_decode == 0
        await idle(prefill, decode)
