"""Engines with asynchronous scheduling draw the same tokens as plain vLLM.

Plain vLLM is vLLM without the mesh. An engine with asynchronous scheduling schedules a step while
it computes the step before. This is the short form for CI. Each night, the whole suite runs with
`PDMESH_ASYNC_SCHEDULING=on make e2e`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from pdmesh.core.instance.async_scheduling import AsyncScheduling
from pdmesh.core.sampling.logit_shaping import LogitShaping
from pdmesh.engine.base import KvReceived, Sampling
from pdmesh.engine.vllm.config import VllmConfig
from tests.e2e.cases import VOCABULARY, Case, differences, generate_all, until_stop
from tests.e2e.conftest import plain_vllm
from tests.e2e.pair import Host, Pair, locally, running
from tests.fakes.tiny_llama import write_tiny_llama
from tests.support.waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="module"),
]
BLOCK_SIZE = 32
STEP_TOKENS = 128  # fewer tokens than the longest prompts have
NUM_TOKENS = 20
NUM_GREEDY = 16
FEW = tuple(range(2000, 2024))  # so few tokens that an answer repeats them
SHAPINGS = (
    LogitShaping(allowed_token_ids=FEW, presence_penalty=2.0),
    LogitShaping(allowed_token_ids=FEW, frequency_penalty=1.5),
    LogitShaping(allowed_token_ids=FEW, repetition_penalty=1.7),
    LogitShaping(allowed_token_ids=FEW, min_tokens=7),
    LogitShaping(allowed_token_ids=FEW, bad_words=tuple((a, b) for a in FEW for b in FEW[:12])),
)


def all_cases() -> list[Case]:
    """Cases that are greedy, seeded at temperature 2, or shaped.

    Some prompts need several blocks and several steps.
    """
    rng = random.Random(43)
    lengths = (1, 31, 32, 33, 64, 90, 200, 300)
    prompts = [tuple(rng.choices(VOCABULARY, k=length)) for length in (*lengths, *lengths)]
    greedy = [Case(prompt, NUM_TOKENS) for prompt in prompts[:NUM_GREEDY]]
    seeded = [Case(p, NUM_TOKENS, 2.0, seed) for seed, p in enumerate(prompts[:8])]
    shaped = [
        Case(p, NUM_TOKENS, 1.3, 100 + n, shaping, FEW[:3] if shaping.min_tokens else ())
        for n, shaping in enumerate(SHAPINGS)
        for p in prompts[4:6]
    ]
    return [*greedy, *seeded, *shaped]


CASES = all_cases()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    folder = tmp_path_factory.mktemp("plain")
    with plain_vllm(
        model, CASES, folder, block_size=BLOCK_SIZE, max_model_len=1024, async_scheduling=False
    ) as plain:
        return plain.tokens()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ahead(model: Path, expected: list[list[int]]) -> AsyncIterator[Pair]:
    """A prefill and a decode that schedule ahead. They start when plain vLLM has ended."""
    config = VllmConfig(
        "prefill-0",
        1,
        model,
        "tiny",
        dtype="float32",
        block_size=BLOCK_SIZE,
        kv_cache_bytes=64 << 20,
        staging_bytes=32 << 20,
        landing_bytes=0,
        max_model_len=1024,
        max_num_batched_tokens=STEP_TOKENS,
        async_scheduling=AsyncScheduling.ON,
    )
    decode = replace(
        config, instance_id="decode-0", incarnation=2, staging_bytes=0, landing_bytes=32 << 20
    )
    async with running(config) as prefilling, running(decode) as decoding:
        yield Pair(prefilling, decoding)


def counted(host: Host, name: str) -> float:
    return host.engine.stats().extra[name]


def num_held(host: Host) -> int:
    """The number of KV blocks that requests hold."""
    return host.info.num_kv_blocks - host.engine.stats().num_kv_blocks_free


@pytest.mark.req("S139", "S140", "S142")
async def test_a_pair_draws_what_plain_vllm_draws_and_schedules_one_step_ahead(
    ahead: Pair, expected: list[list[int]]
) -> None:
    """`make bench NAME=steps` measures the share of steps that overlap, which depends on times."""
    got = await generate_all(ahead.generate, CASES, num_concurrent=8)
    assert differences(expected, got) == []
    assert ahead.num_handed_over >= len(CASES) - 2
    assert ahead.num_computed_at_decode == 0
    for host in (ahead.prefill, ahead.decode):
        assert counted(host, "most_ahead") == 1
        for part in ("num_steps", "schedule_s", "compute_s", "process_s"):
            assert counted(host, part) > 0
    assert counted(ahead.decode, "num_overlapped") > 0
    await ahead.prefill.until_idle()
    await ahead.decode.until_idle()


@pytest.mark.req("S48", "S142")
async def test_a_pair_draws_the_same_with_kv_handed_over_per_layer(
    ahead: Pair, expected: list[list[int]]
) -> None:
    got = await generate_all(ahead.generate_per_layer, CASES, num_concurrent=6)
    assert differences(expected, got) == []


@pytest.mark.req("S37", "S142")
@pytest.mark.parametrize("num_drawn", [1, 11])
async def test_an_answer_is_the_same_after_a_death_at_any_token(
    ahead: Pair, expected: list[list[int]], num_drawn: int
) -> None:
    """As at a gateway, the tokens drawn before the death are part of the new prompt."""
    longer = [n for n, tokens in enumerate(expected) if len(tokens) > num_drawn]
    replayed = [
        replace(
            CASES[n],
            prompt=(*CASES[n].prompt, *expected[n][:num_drawn]),
            max_tokens=NUM_TOKENS - num_drawn,
        )
        for n in longer
    ]

    def goes_on(sampling: Sampling) -> Sampling:
        return replace(sampling, num_drawn=num_drawn)

    got = await generate_all(
        lambda prompt, sampling: locally(ahead.decode, prompt, goes_on(sampling)), replayed, 8
    )
    assert differences([expected[n][num_drawn:] for n in longer], got) == []


@pytest.mark.req("S142", "S148")
async def test_a_stop_token_costs_one_token_that_nobody_sees(
    ahead: Pair, expected: list[list[int]]
) -> None:
    """The engine foresees the end at `max_tokens`. So only a stop token costs a token."""
    stops = [frozenset({expected[n][1 + 2 * n % NUM_TOKENS]}) for n in range(NUM_GREEDY // 2)]
    stopped = [until_stop(tokens, stop) for tokens, stop in zip(expected, stops, strict=False)]
    await ahead.decode.until_idle()
    before = counted(ahead.decode, "num_tokens_past_end")
    got = await generate_all(ahead.generate, CASES[: len(stops)], 4, stops)
    assert differences(stopped, got) == []
    surprises = sum(1 < len(tokens) < NUM_TOKENS for tokens in stopped)
    assert surprises > 0
    await until(lambda: counted(ahead.decode, "num_tokens_past_end") - before == surprises)


@pytest.mark.req("S148")
@pytest.mark.fault("F27")
async def test_aborts_within_a_step_harm_no_other_answer_and_free_every_block(
    ahead: Pair, expected: list[list[int]]
) -> None:
    """Other requests get the freed blocks while the step that wrote to these blocks still runs."""
    rng = random.Random(5)
    sampling = Sampling(max_tokens=200)
    is_done = False

    async def disturb(prompt: tuple[int, ...]) -> None:
        while not is_done:
            first = await ahead.prefilled(prompt, sampling)
            assert first.ticket is not None
            leg = await ahead.start_decode(prompt, first.token, first.ticket, sampling)
            received = await ahead.decode.next_output(leg)
            assert isinstance(received, KvReceived), received
            for _ in range(rng.randrange(1, 4)):
                await ahead.decode.next_output(leg)
            ahead.decode.abort(leg)

    before = counted(ahead.decode, "num_tokens_past_end")
    disturbers = [asyncio.create_task(disturb(case.prompt)) for case in CASES[5:8]]
    got = await generate_all(ahead.generate, CASES, num_concurrent=4)
    is_done = True
    await asyncio.gather(*disturbers)
    assert differences(expected, got) == []
    await ahead.decode.until_idle()
    await until(lambda: num_held(ahead.decode) == 0)
    assert counted(ahead.decode, "num_tokens_past_end") > before
