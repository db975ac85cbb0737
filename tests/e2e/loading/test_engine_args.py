"""Engine arguments without a setting in the mesh reach vLLM.

Engines with different arguments have different fingerprints, so they exchange no KV.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from pdmesh.engine.vllm.config import VllmConfig
from pdmesh.errors import EngineMisconfigured
from tests.e2e.cases import VOCABULARY, Case, differences, generate_all
from tests.e2e.conftest import ASYNC_SCHEDULING, plain_vllm
from tests.e2e.loading.gptq import write_gptq
from tests.e2e.pair import Pair, running
from tests.fakes.tiny_llama import write_tiny_llama

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="module"),
]
BLOCK_SIZE = 32
OVERRIDES = {"rms_norm_eps": 0.5}
OTHER_NORM: Mapping[str, object] = {"hf_overrides": OVERRIDES}


def some_cases() -> list[Case]:
    rng = random.Random(8)
    lengths = [1, 31, 32, 33, 100, 333, *(rng.randint(2, 160) for _ in range(14))]
    return [Case(tuple(rng.choices(VOCABULARY, k=n)), 6) for n in lengths]


def config(model_dir: Path, instance_id: str, incarnation: int) -> VllmConfig:
    return VllmConfig(
        instance_id,
        incarnation,
        model_dir,
        "tiny",
        block_size=BLOCK_SIZE,
        kv_cache_bytes=64 << 20,
        staging_bytes=32 << 20,
        landing_bytes=32 << 20,
        max_model_len=1024,
        async_scheduling=ASYNC_SCHEDULING,
    )


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.mark.nightly
async def test_arguments_reach_both_engines_and_the_answers_are_plain_vllms_with_them(
    tiny_llama: Path, tmp_path: Path
) -> None:
    cases = some_cases()
    folders = [tmp_path / "with", tmp_path / "without"]
    for folder in folders:
        folder.mkdir()
    async with AsyncExitStack() as stack:
        plain = stack.enter_context(
            plain_vllm(tiny_llama, cases, folders[0], block_size=BLOCK_SIZE, hf_overrides=OVERRIDES)
        )
        without = stack.enter_context(
            plain_vllm(tiny_llama, cases, folders[1], block_size=BLOCK_SIZE)
        )
        asked, tokens = plain.decided(cases)
        prefill, decode, other = [
            await stack.enter_async_context(
                running(replace(config(tiny_llama, name, i), engine_args=args))
            )
            for i, (name, args) in enumerate(
                (
                    ("prefill", OTHER_NORM),
                    ("decode", {**OTHER_NORM, "enforce_eager": "true"}),
                    ("other", {}),
                ),
                1,
            )
        ]
        run = Pair(prefill, decode)
        for generate in (run.generate, run.generate_per_layer):
            assert differences(tokens, await generate_all(generate, asked, num_concurrent=2)) == []
        assert run.num_computed_at_decode == 0
        # Without the argument, answers and KV are different.
        assert differences(without.tokens(), plain.tokens())
        assert prefill.info.model_fingerprint == decode.info.model_fingerprint
        assert prefill.info.model_fingerprint != other.info.model_fingerprint
        for host in (prefill, decode):
            await host.until_idle()


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"enforce_eagr": "true"}, "engine_args.enforce_eagr: .*did you mean enforce_eager"),
        ({"gpu_memory_utilization": "much"}, "engine_args.gpu_memory_utilization: invalid float"),
    ],
)
async def test_an_argument_that_vllm_does_not_take_is_named_before_the_engine_starts(
    tiny_llama: Path, args: Mapping[str, object], problem: str
) -> None:
    with pytest.raises(EngineMisconfigured, match=problem) as refused:
        async with running(replace(config(tiny_llama, "p", 1), engine_args=args)):
            pass
    assert refused.value.field == f"engine_args.{next(iter(args))}"


@pytest.mark.nightly
@pytest.mark.req("S123")
async def test_a_model_with_four_bit_weights_is_served_by_a_pair(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """The KV has the format of the computation. The model has its own fingerprint."""
    cases = some_cases()
    folder = tmp_path / "quantised"
    folder.mkdir()
    write_gptq(tiny_llama, folder)
    dtype = "bfloat16"
    async with AsyncExitStack() as stack:
        plain = stack.enter_context(
            plain_vllm(folder, cases, tmp_path, dtype, BLOCK_SIZE, max_num_seqs=1)
        )
        tokens = plain.tokens()
        prefill, decode, full = [
            await stack.enter_async_context(
                running(replace(config(model, name, i), dtype=dtype, max_num_seqs=2))
            )
            for i, (name, model) in enumerate(
                (("prefill", folder), ("decode", folder), ("full", tiny_llama)), 1
            )
        ]
        run = Pair(prefill, decode)
        for generate in (run.generate, run.generate_per_layer):
            assert differences(tokens, await generate_all(generate, cases, num_concurrent=1)) == []
        assert run.num_computed_at_decode == 0
        assert prefill.info.model_fingerprint == decode.info.model_fingerprint
        assert prefill.info.model_fingerprint != full.info.model_fingerprint
        for host in (prefill, decode):
            await host.until_idle()
