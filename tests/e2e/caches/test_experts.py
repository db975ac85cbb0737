"""A prefill and a decode draw the same tokens as plain vLLM, with a mixture of experts.

Plain vLLM is vLLM without the mesh. Experts keep no KV, so the same KV moves as with any other
model. But with wrong KV, a token soon chooses other experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdmesh.engine.vllm.config import VllmConfig, installed_device
from pdmesh.errors import EngineMisconfigured
from tests.e2e.caches.tiny_experts import write_tiny_qwen3_moe
from tests.e2e.caches.transformers_answers import num_unlike_transformers
from tests.e2e.cases import Case, cases, differences, generate_all
from tests.e2e.conftest import ASYNC_SCHEDULING, BLOCK_SIZE, NEAR_TIE, Plain, plain_vllm
from tests.e2e.pair import Pair, running

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(installed_device() != "cpu", reason="near-ties are those of float32"),
]
MAX_MODEL_LEN = 768
NUM_CONCURRENT = 4
CASES = cases(BLOCK_SIZE)[::5]  # a fifth of the cases, to save time


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3_moe(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    with plain_vllm(
        model_dir,
        CASES,
        tmp_path_factory.mktemp("plain"),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=NUM_CONCURRENT,
        kv_cache_memory_bytes=64 << 20,
    ) as plain:
        yield plain


def clear(plain: Plain) -> tuple[list[Case], list[list[int]]]:
    """The cases and answers, each cut at its first near-tie.

    A near-tie is a step in which two tokens are almost equally likely. Cases that begin with a
    near-tie are left out.
    """
    both = zip(*plain.cut(CASES, NEAR_TIE), strict=True)
    kept = [(case, answer) for case, answer in both if answer]
    assert len(kept) > len(CASES) // 2
    return [case for case, _ in kept], [answer for _, answer in kept]


def config(model_dir: Path, instance_id: str, incarnation: int, **more: Any) -> VllmConfig:
    return VllmConfig(
        instance_id,
        incarnation,
        model_dir,
        "tiny",
        kv_cache_bytes=64 << 20,
        staging_bytes=32 << 20,
        landing_bytes=32 << 20,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        async_scheduling=ASYNC_SCHEDULING,
        **more,
    )


async def test_plain_vllm_draws_what_transformers_draws(model_dir: Path, plain: Plain) -> None:
    """Otherwise, equality with plain vLLM would show little."""
    todo, answers = clear(plain)
    assert num_unlike_transformers(model_dir, [case.prompt for case in todo], answers) == 0


@pytest.mark.req("S1", "S3", "S48")
@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_a_pair_draws_what_plain_vllm_draws(
    model_dir: Path, plain: Plain, num_ranks: int
) -> None:
    """With two ranks, each rank holds a part of every expert."""
    todo, expected = clear(plain)
    first, second = (
        config(model_dir, f"{role}-of-{num_ranks}", number, tensor_parallel_size=num_ranks)
        for number, role in enumerate(("prefill", "decode"), 1)
    )
    async with running(first) as prefill, running(second) as decode:
        assert (prefill.info.num_ranks, decode.info.num_ranks) == (num_ranks, num_ranks)
        for generate in ((run := Pair(prefill, decode)).generate, run.generate_per_layer):
            got = await generate_all(generate, todo, NUM_CONCURRENT)
            assert differences(expected, got) == []
            run.salt = "per-layer"
        num_handed_over = 2 * sum(case.max_tokens > 1 for case in todo)
        assert (run.num_handed_over, run.num_computed_at_decode) == (num_handed_over, 0)
        await prefill.until_idle()
        await decode.until_idle()


async def test_the_comparison_fails_when_kv_is_zeroed_on_arrival(
    model_dir: Path, plain: Plain
) -> None:
    todo, expected = clear(plain)
    picked = [i for i, tokens in enumerate(expected) if len(tokens) >= 3]
    broken = replace(config(model_dir, "broken", 4), failpoints="decode.pulled=zero-kv")
    async with running(config(model_dir, "whole", 3)) as prefill, running(broken) as decode:
        run = Pair(prefill, decode)
        got = await generate_all(run.generate, [todo[i] for i in picked], NUM_CONCURRENT)
    assert len(differences([expected[i] for i in picked], got)) > len(picked) // 2


@pytest.mark.req("S122")
async def test_whole_experts_on_ranks_are_refused_on_a_cpu_in_one_line(model_dir: Path) -> None:
    """Without the refusal, vLLM would end with a segmentation fault in the first step."""
    shared_out = config(
        model_dir,
        "shared-out",
        5,
        tensor_parallel_size=2,
        engine_args={"enable_expert_parallel": True},
    )
    with pytest.raises(EngineMisconfigured, match="shared out over ranks; leave it out") as caught:
        async with running(shared_out):
            pytest.fail("it started")
    assert caught.value.field == "engine_args.enable_expert_parallel"
    assert "\n" not in caught.value.message
