"""A client may name tokens, and gets their log probabilities beside each token of the answer.

On all legs, these must equal the log probabilities of plain vLLM, which is vLLM without the mesh.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from pdmesh.engine.base import (
    Finished,
    KvReceived,
    Prefilled,
    PrefillJob,
    Sampling,
    TokenLogprob,
    Tokens,
)
from tests.e2e.cases import VOCABULARY, Case
from tests.e2e.conftest import Plain, plain_vllm, prefill_config
from tests.e2e.pair import Host, Pair, running

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="session"),
]
NUM_PROMPTS: Final = 20
NUM_TOKENS: Final = 8
NUM_DRAWN: Final = 3  # tokens drawn before a death
Told = list[list[tuple[int, float]]]  # for each token, log probabilities by token id


def named_cases() -> list[Case]:
    rng = random.Random("named")
    return [
        Case(
            tuple(rng.choices(VOCABULARY, k=rng.choice((3, 30, 64, 90)))),
            NUM_TOKENS,
            0.0 if index % 2 else 1.2,
            4000 + index,
            logprob_token_ids=tuple(rng.choices(VOCABULARY, k=rng.randrange(2, 7))),
        )
        for index in range(NUM_PROMPTS)
    ]


CASES: Final = named_cases()


@pytest.fixture(scope="module")
def plain_named(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    with plain_vllm(model_dir, CASES, tmp_path_factory.mktemp("named")) as plain:
        plain.tokens()
        return plain


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fusion(model_dir: Path) -> AsyncIterator[Host]:
    config = replace(prefill_config(model_dir), instance_id="fusion-0", staging_bytes=0)
    async with running(config) as host:
        yield host


async def of_leg(host: Host, leg: int) -> list[TokenLogprob]:
    found: list[TokenLogprob] = []
    while not isinstance(output := await host.next_output(leg), Finished):
        if isinstance(output, Tokens):
            found += output.logprobs
        else:
            assert isinstance(output, KvReceived)
    del host.legs[leg]
    return found


async def by_pair(pair: Pair, prompt: Sequence[int], sampling: Sampling) -> list[TokenLogprob]:
    first = await pair.prefilled(prompt, sampling)
    assert first.logprob is not None
    assert first.ticket is not None
    leg = await pair.start_decode(prompt, first.token, first.ticket, sampling)
    return [first.logprob, *await of_leg(pair.decode, leg)]


async def by_fusion(host: Host, prompt: Sequence[int], sampling: Sampling) -> list[TokenLogprob]:
    leg = Pair(host, host).next_leg(host)
    host.engine.prefill(PrefillJob(leg, "r", 0, array("I", prompt), sampling))
    first = await host.next_output(leg)
    assert isinstance(first, Prefilled)
    assert first.logprob is not None
    if first.finish_reason is not None:
        return [first.logprob]
    return [first.logprob, *await of_leg(host, leg)]


def check(found: Sequence[TokenLogprob], expected: Told) -> None:
    assert len(found) == len(expected)
    for each, told in zip(found, expected, strict=True):
        assert [token for token, _ in each.top] == [token for token, _ in told]
        values = [value for _, value in told]
        assert [value for _, value in each.top] == pytest.approx(values, abs=1e-3)
        assert (each.token_id, each.logprob) == each.top[0], "the drawn token is the first"


@pytest.mark.req("S1", "S49")
async def test_a_pair_gives_the_logprobs_of_plain_vllm(pair: Pair, plain_named: Plain) -> None:
    for case, expected in zip(CASES, plain_named.told(), strict=True):
        check(await by_pair(pair, case.prompt, case.sampling()), expected)


@pytest.mark.req("S37", "S72")
async def test_fusion_gives_the_logprobs_of_plain_vllm_also_after_a_death(
    fusion: Host, plain_named: Plain
) -> None:
    async def whole_and_rest(case: Case, tokens: list[int], told: Told) -> None:
        sampling = case.sampling()
        check(await by_fusion(fusion, case.prompt, sampling), told)
        rest = replace(sampling, max_tokens=NUM_TOKENS - NUM_DRAWN, num_drawn=NUM_DRAWN)
        prompt = (*case.prompt, *tokens[:NUM_DRAWN])
        check(await by_fusion(fusion, prompt, rest), told[NUM_DRAWN:])

    drawn = zip(CASES, plain_named.tokens(), plain_named.told(), strict=True)
    await asyncio.gather(*(whole_and_rest(*each) for each in drawn))


async def test_a_neighbour_in_the_batch_keeps_its_likeliest_tokens(fusion: Host) -> None:
    """vLLM itself would give this request no log probabilities of its likeliest tokens."""
    likeliest = Sampling(NUM_TOKENS, num_logprobs=3)
    alone = await by_fusion(fusion, CASES[0].prompt, likeliest)
    together = await asyncio.gather(
        *(by_fusion(fusion, case.prompt, case.sampling()) for case in CASES[1:6]),
        by_fusion(fusion, CASES[0].prompt, likeliest),
    )
    for one, other in zip(alone, together[-1], strict=True):
        assert one.token_id == other.token_id
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert len(other.top) == 3
