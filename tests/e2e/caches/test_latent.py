"""Latent attention (MLA) on vLLM's reference kernel for CPUs, through prefill and decode.

vLLM caches no prefixes of it on a CPU without AMX and computes a prompt in one step, so neither
side finds anything in its cache, and every prompt moves whole.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from pdmesh.engine.base import Sampling
from pdmesh.engine.vllm.config import VllmConfig
from tests.e2e.caches.tiny_windowed import VOCABULARY_SIZE
from tests.e2e.cases import VOCABULARY, Case, differences, generate_all
from tests.e2e.conftest import ASYNC_SCHEDULING, plain_vllm
from tests.e2e.pair import Pair, running

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM's own
    pytest.mark.asyncio(loop_scope="module"),
]
BLOCK_SIZE: Final = 16  # the only one that the kernel has
MAX_MODEL_LEN: Final = 512
LATENT: Final = 512 + 64  # numbers of a token in a layer: the only size that the kernel has
NUM_LAYERS: Final = 3


def write_tiny_deepseek(directory: Path) -> Path:
    """DeepSeek V2 without experts: latent attention in each layer."""
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        first_k_dense_replace=NUM_LAYERS,
        max_position_embeddings=2048,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    DeepseekV2ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def config(model_dir: Path, instance_id: str, incarnation: int, **more: Any) -> VllmConfig:
    return VllmConfig(
        instance_id,
        incarnation,
        model_dir,
        "tiny",
        dtype="float32",
        block_size=BLOCK_SIZE,
        kv_cache_bytes=64 << 20,
        staging_bytes=32 << 20,
        landing_bytes=32 << 20,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        async_scheduling=ASYNC_SCHEDULING,
        **more,
    )


@pytest.mark.req("S1", "S3", "S48", "S77")
async def test_latents_are_handed_over_and_spoilt_ones_are_seen(tmp_path: Path) -> None:
    rng = random.Random(5)
    lengths = (1, 15, 16, 17, 31, 32, 33, 100, 160, 250, 300)
    cases = [Case(tuple(rng.choices(VOCABULARY, k=n)), 12) for n in lengths]
    (folder := tmp_path / "model").mkdir()
    model_dir = write_tiny_deepseek(folder)
    with plain_vllm(
        model_dir, cases, tmp_path, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN
    ) as plain:
        todo, expected = plain.decided(cases)
    first_spoilt = 3 * len(todo) + 2
    spoiling = f"decode.pulled=zero-kv@{first_spoilt}+"
    async with (
        running(config(model_dir, "prefill", 1)) as prefill,
        running(config(model_dir, "decode", 2, failpoints=spoiling)) as decode,
    ):
        run = Pair(prefill, decode, salt="whole")
        assert differences(expected, await generate_all(run.generate, todo, 4)) == []
        await run.generate(cases[lengths.index(100)].prompt, Sampling(max_tokens=2))
        assert run.last_received is not None
        assert run.last_received.kv_bytes == 7 * BLOCK_SIZE * NUM_LAYERS * LATENT * 4
        assert (run.num_handed_over, run.num_computed_at_decode) == (len(todo) + 1, 0)
        layered = Pair(prefill, decode, salt="layered")
        assert differences(expected, await generate_all(layered.generate_per_layer, todo, 4)) == []
        assert (layered.num_handed_over, layered.num_computed_at_decode) == (len(todo), 0)
        moves = Pair(prefill, decode, salt="moves")

        async def moved(prompt: Sequence[int], sampling: Sampling) -> list[int]:
            """The second half goes on after a prefill of the prompt and the first half."""
            half = sampling.max_tokens // 2
            drawn = await moves.generate(prompt, replace(sampling, max_tokens=half))
            rest = replace(sampling, max_tokens=sampling.max_tokens - half)
            return [*drawn, *await moves.generate([*prompt, *drawn], rest)]

        picked = [i for i, case in enumerate(todo) if case.max_tokens >= 2][: len(todo) // 2]
        answers = [expected[i] for i in picked]
        got = await generate_all(moved, [todo[i] for i in picked], 4)
        assert differences(answers, got) == []
        spoilt = Pair(prefill, decode, salt="spoilt")
        for _ in range(2):  # by the second round the first spoilt pull is past
            got = await generate_all(spoilt.generate, todo, 1)
        assert len(differences(expected, got)) > len(todo) // 2
        await prefill.until_idle()
        await decode.until_idle()
