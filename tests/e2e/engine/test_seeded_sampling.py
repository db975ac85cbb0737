"""A draw with a seed depends on the seed and the token's position, and not on the engine.

At temperature 2, almost no drawn token is the likeliest one, so an answer depends on the noise of
each of its tokens. Answers must equal those of plain vLLM, which is vLLM without the mesh. The
random generators of plain vLLM run from the first token to the last without a break.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from pdmesh.engine.base import Sampling
from tests.e2e.cases import VOCABULARY, Case, differences, generate_all
from tests.e2e.conftest import plain_vllm, prefill_config
from tests.e2e.pair import Host, Pair, locally, running

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="session"),
]
NUM_TOKENS = 24
CHUNK = 128  # tokens per step of the fusion engine
SEEDS = (0, 1, 7, 42, -2, -3, 1 << 40, (1 << 62) + 5)


def seeded_cases() -> list[Case]:
    """Short prompts, and prompts that need several steps of CHUNK tokens."""
    rng = random.Random(29)
    lengths = (5, 40, 64, 90, 130, 200, 400, 600)
    return [
        Case(tuple(rng.choices(VOCABULARY, k=length)), NUM_TOKENS, 2.0, seed)
        for length, seed in zip(lengths, SEEDS, strict=True)
    ]


def growing_cases() -> list[Case]:
    """Each answer begins in the first block of KV and ends in the third."""
    rng = random.Random(31)
    return [Case(tuple(rng.choices(VOCABULARY, k=60)), 100, 2.0, 50 + n) for n in range(6)]


@pytest.fixture(scope="module")
def plain_answers(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    asked = [*seeded_cases(), *growing_cases()]
    with plain_vllm(model_dir, asked, tmp_path_factory.mktemp("seeded")) as plain:
        tokens = plain.tokens()
    assert len({tuple(answer) for answer in tokens}) == len(tokens)
    return tokens


@pytest.fixture(scope="module")
def expected(plain_answers: list[list[int]]) -> list[list[int]]:
    return plain_answers[: len(SEEDS)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fusion(model_dir: Path) -> AsyncIterator[Host]:
    """An engine that computes chunks of prompts together with the decodes of other requests."""
    config = replace(
        prefill_config(model_dir),
        instance_id="fusion-0",
        staging_bytes=0,
        max_num_batched_tokens=CHUNK,
    )
    async with running(config) as host:
        yield host


@pytest.mark.req("S1", "S49")
async def test_a_pair_draws_what_one_engine_draws(pair: Pair, expected: list[list[int]]) -> None:
    got = await generate_all(pair.generate, seeded_cases(), num_concurrent=3)
    assert differences(expected, got) == []


@pytest.mark.req("S48")
async def test_a_pair_draws_the_same_with_kv_handed_over_per_layer(
    pair: Pair, expected: list[list[int]]
) -> None:
    got = await generate_all(pair.generate_per_layer, seeded_cases(), num_concurrent=3)
    assert differences(expected, got) == []


@pytest.mark.req("S72")
async def test_fusion_draws_the_same_with_chunked_prompts_and_decodes_together(
    fusion: Host, expected: list[list[int]]
) -> None:
    got = await generate_all(
        lambda prompt, sampling: locally(fusion, prompt, sampling), seeded_cases(), 8
    )
    assert differences(expected, got) == []


@pytest.mark.req("S37")
@pytest.mark.parametrize("num_drawn", [1, 2, 11, NUM_TOKENS - 2])
async def test_an_answer_is_the_same_after_a_death_at_any_token(
    pair: Pair, fusion: Host, expected: list[list[int]], num_drawn: int
) -> None:
    """As at a gateway, the tokens drawn before the death are part of the new prompt."""
    replayed = [
        replace(
            case,
            prompt=(*case.prompt, *tokens[:num_drawn]),
            max_tokens=NUM_TOKENS - num_drawn,
        )
        for case, tokens in zip(seeded_cases(), expected, strict=True)
    ]
    rest = [tokens[num_drawn:] for tokens in expected]

    def goes_on(sampling: Sampling) -> Sampling:
        return replace(sampling, num_drawn=num_drawn)

    got = await generate_all(
        lambda prompt, sampling: pair.generate(prompt, goes_on(sampling)), replayed, 3
    )
    assert differences(rest, got) == []
    got = await generate_all(
        lambda prompt, sampling: locally(fusion, prompt, goes_on(sampling)), replayed, 8
    )
    assert differences(rest, got) == []


@pytest.mark.nightly
async def test_an_answer_is_the_same_after_a_preemption(
    model_dir: Path, plain_answers: list[list[int]]
) -> None:
    """Six answers need eighteen blocks. The cache has fewer than sixteen."""
    config = replace(
        prefill_config(model_dir),
        instance_id="small-0",
        staging_bytes=0,
        kv_cache_bytes=40 << 20,
        max_model_len=704,
    )
    async with running(config) as host:
        assert host.info.num_kv_blocks < 16
        got = await generate_all(
            lambda prompt, sampling: locally(host, prompt, sampling), growing_cases(), 6
        )
        assert differences(plain_answers[len(SEEDS) :], got) == []
        assert host.engine.stats().extra["num_preempted"] > 0


async def test_the_seed_that_vllm_reads_as_none_is_an_ordinary_seed(fusion: Host) -> None:
    """The seed is -1. The second choice of a request with the seed -2 also gets this seed."""
    prompt = seeded_cases()[0].prompt
    sampling = Sampling(NUM_TOKENS, 2.0, seed=-1)
    once, again = [await locally(fusion, prompt, sampling) for _ in range(2)]
    assert once == again
