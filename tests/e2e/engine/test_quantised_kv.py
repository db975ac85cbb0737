"""KV in fp8 is handed over with one byte per number, and outputs stay equal.

Only engines that store KV in fp8 accept it. Both sides run one request at a time, because the order
of sums in a batch changes results in fp8, but not in fp32.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from pdmesh.engine.base import Sampling
from pdmesh.engine.vllm.config import VllmConfig
from tests.e2e.cases import VOCABULARY, Case, differences, generate_all
from tests.e2e.conftest import ASYNC_SCHEDULING, Plain, plain_vllm
from tests.e2e.pair import Host, LegFailed, Pair, running
from tests.e2e.processor import needs_fp8
from tests.fakes.tiny_llama import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, write_tiny_llama

pytestmark = [
    needs_fp8,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="module"),
]
DTYPE = "bfloat16"  # the dtype of the computation
BLOCK_SIZE = 32


def fp8_cases(seed: int = 6) -> list[Case]:
    rng = random.Random(seed)
    lengths = [1, 31, 32, 33, 64, 150, 333, *(rng.randint(2, 160) for _ in range(17))]
    return [Case(tuple(rng.choices(VOCABULARY, k=n)), rng.choice((2, 5, 8))) for n in lengths]


def config(model_dir: Path, instance_id: str, incarnation: int) -> VllmConfig:
    return VllmConfig(
        instance_id,
        incarnation,
        model_dir,
        "tiny",
        dtype=DTYPE,
        kv_cache_dtype="fp8",
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


def plainly(model_dir: Path, folder: Path, stored: str) -> AbstractContextManager[Plain]:
    return plain_vllm(
        model_dir,
        fp8_cases(),
        folder,
        dtype=DTYPE,
        block_size=BLOCK_SIZE,
        kv_cache_dtype=stored,
        max_num_seqs=1,
        max_model_len=1024,
        kv_cache_memory_bytes=64 << 20,
    )


@pytest.fixture(scope="module")
def plain(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Plain]]:
    """Plain vLLM by KV format. It draws the cases while the engines under test start."""
    with (
        plainly(tiny_llama, tmp_path_factory.mktemp("plain-fp8"), "fp8") as fp8,
        plainly(tiny_llama, tmp_path_factory.mktemp("plain-auto"), "auto") as auto,
    ):
        yield {"fp8": fp8, "auto": auto}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def prefill(tiny_llama: Path, plain: dict[str, Plain]) -> AsyncIterator[Host]:
    """The prefill. Plain vLLM starts first, so that it computes while the prefill starts."""
    async with running(config(tiny_llama, "prefill-fp8", 1)) as prefill:
        yield prefill


@pytest.mark.req("S125", "S126", "S3")
async def test_fp8_kv_is_handed_over_at_a_byte_per_number_with_equal_outputs(
    prefill: Host, plain: dict[str, Plain], tiny_llama: Path
) -> None:
    assert prefill.info.kv_bytes_per_token == NUM_LAYERS * 2 * NUM_KV_HEADS * HEAD_DIM
    assert ".fp8_e4m3.per-tensor-" in prefill.info.model_fingerprint
    async with running(config(tiny_llama, "decode-fp8", 2)) as decode:
        pair = Pair(prefill, decode)
        got = await generate_all(pair.generate, fp8_cases(), num_concurrent=1)
        assert differences(plain["fp8"].tokens(), got) == []
        assert pair.num_computed_at_decode == 0
        assert pair.num_handed_over == len(fp8_cases())
        await prefill.until_idle()
        await decode.until_idle()


@pytest.mark.req("S126")
async def test_the_compared_outputs_depend_on_the_kv_format(plain: dict[str, Plain]) -> None:
    """Otherwise, the test above would pass with KV of any precision."""
    assert differences(plain["auto"].tokens(), plain["fp8"].tokens())


@pytest.mark.req("S126", "S127")
async def test_an_engine_with_another_kv_format_refuses_and_names_both(
    prefill: Host, tiny_llama: Path
) -> None:
    other = replace(config(tiny_llama, "decode-bf16", 3), kv_cache_dtype="auto")
    prompt, sampling = list(fp8_cases()[5].prompt), Sampling(max_tokens=4)
    async with running(other) as decode:
        assert decode.info.model_fingerprint != prefill.info.model_fingerprint
        assert prefill.info.num_kv_blocks >= 1.9 * decode.info.num_kv_blocks, "of equal memory"
        pair = Pair(prefill, decode)
        first = await pair.prefilled(prompt, sampling)
        assert first.ticket is not None
        with pytest.raises(LegFailed) as caught:
            await pair.decoded(prompt, first.token, first.ticket, sampling)
        assert caught.value.reason == "KV_FORMAT_MISMATCH"
        assert "prefill-fp8 keeps its KV as fp8_e4m3" in str(caught.value)
        assert "decode-bf16 as bfloat16" in str(caught.value)
        await decode.until_idle()
    prefill.engine.release(first.ticket.ticket_id)
    await prefill.until_idle()
