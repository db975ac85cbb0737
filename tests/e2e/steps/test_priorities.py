"""An engine serves the most urgent request first, and preempts the least urgent one (S83).

Two tests have a control: with `fcfs`, vLLM serves requests by arrival, and preempts the latest one.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from pdmesh.core.instance.urgency import SchedulingPolicy
from pdmesh.engine.base import PrefillJob, Sampling
from pdmesh.engine.vllm.config import VllmConfig
from tests.e2e.cases import VOCABULARY, Case, differences
from tests.e2e.conftest import ASYNC_SCHEDULING, plain_vllm
from tests.e2e.pair import Host, Pair, running, whole_answer
from tests.fakes.tiny_llama import write_tiny_llama
from tests.support.waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="module"),
]
BLOCK_SIZE = 32
STEP_TOKENS = 64
URGENT, BATCH = 0, 3
POLICIES = [SchedulingPolicy.PRIORITY, SchedulingPolicy.FCFS]


def prompts(seed: int, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.choices(VOCABULARY, k=length)) for length in lengths]


LONG = prompts(1, [960] * 7)  # prompts of 15 steps each
SHORT = prompts(2, [20, 100])
# Two answers that together need more blocks than the cache of `small` has. The first is of class
# BATCH.
GROWING = [Case(prompt, 180) for prompt in prompts(3, [150, 140])]
NUM_BLOCKS = 14
# The cases are one of SHORT, one of LONG, and both of GROWING.
CASES = [*(Case(prompt, 6) for prompt in (SHORT[0], LONG[0])), *GROWING]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    folder = tmp_path_factory.mktemp("plain")
    with plain_vllm(model, CASES, folder, block_size=BLOCK_SIZE, max_model_len=1024) as plain:
        return plain.tokens()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=POLICIES, ids=str)
async def host(
    model: Path, expected: list[list[int]], request: pytest.FixtureRequest
) -> AsyncIterator[tuple[Host, SchedulingPolicy]]:
    """An engine that does both phases, in steps of few tokens.

    It starts when plain vLLM has ended.
    """
    policy: SchedulingPolicy = request.param
    config = VllmConfig(
        "fusion-0",
        1,
        model,
        "tiny",
        dtype="float32",
        block_size=BLOCK_SIZE,
        kv_cache_bytes=64 << 20,
        staging_bytes=0,
        landing_bytes=0,
        max_model_len=1024,
        max_num_batched_tokens=STEP_TOKENS,
        scheduling_policy=policy,
        async_scheduling=ASYNC_SCHEDULING,
    )
    async with running(config) as alone:
        yield alone, policy


def begin(host: Host, prompt: Sequence[int], max_tokens: int, priority: int) -> int:
    leg = Pair(host, host).next_leg(host)
    sampling = Sampling(max_tokens)
    job = PrefillJob(leg, f"r{leg}", 0, array("I", prompt), sampling, priority=priority)
    host.engine.prefill(job)
    return leg


async def in_order_of_end(host: Host, legs: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """The legs in the order in which their answers ended, and the answers."""
    ended: list[int] = []

    async def one(leg: int) -> list[int]:
        tokens = await whole_answer(host, leg)
        ended.append(leg)
        return tokens

    return ended, await asyncio.gather(*map(one, legs))


@contextmanager
def frozen(host: Host) -> Iterator[None]:
    """Freeze the engine's processes. At the end of the block, the engine gets all new requests at
    once.
    """
    for pid in host.engine.worker_pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in host.engine.worker_pids:
            os.kill(pid, signal.SIGCONT)


async def computing(host: Host, num_tokens: int) -> None:
    async with asyncio.timeout(120):
        while host.engine.stats().num_tokens < num_tokens:
            await asyncio.sleep(0)


@pytest.mark.req("S83")
async def test_an_urgent_prompt_passes_those_that_wait_and_the_one_under_way(
    host: tuple[Host, SchedulingPolicy],
) -> None:
    """The step is full of BATCH prompts when two urgent prompts arrive at the same time."""
    engine, policy = host
    before = engine.engine.stats().num_tokens
    batch = [begin(engine, prompt, 1, BATCH) for prompt in LONG]
    await computing(engine, before + 2 * STEP_TOKENS)
    with frozen(engine):
        urgent = [begin(engine, prompt, 1, URGENT) for prompt in SHORT]
        await asyncio.sleep(0.2)  # wait until both are sent
        computed = engine.engine.stats().num_tokens - before
    ended, _ = await in_order_of_end(engine, [*batch, *urgent])
    num_before = min(ended.index(leg) for leg in urgent)
    if policy is SchedulingPolicy.FCFS:
        assert ended == [*batch, *urgent]
        return
    assert ended == [*batch[:num_before], *urgent, *batch[num_before:]]
    # Before the urgent prompts, only prompts may end that the step in flight or the next step
    # completed.
    assert num_before <= (computed + 2 * STEP_TOKENS) // len(LONG[0]) < len(batch)


@pytest.mark.req("S83")
async def test_an_answer_is_the_same_if_its_prompt_stood_back(
    host: tuple[Host, SchedulingPolicy], expected: list[list[int]]
) -> None:
    engine, _ = host
    short, long = CASES[:2]
    before = engine.engine.stats().num_tokens
    # A new prompt is used, because there would be nothing to compute for cached blocks.
    ahead = begin(engine, prompts(9, [960])[0], 1, BATCH)
    batch = begin(engine, long.prompt, long.max_tokens, BATCH)
    await computing(engine, before + STEP_TOKENS)
    urgent = begin(engine, short.prompt, short.max_tokens, URGENT)
    _, answers = await in_order_of_end(engine, [ahead, batch, urgent])
    assert differences(expected[:2], [answers[2], answers[1]]) == []
    await engine.until_idle()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=POLICIES, ids=str)
async def small(
    model: Path, expected: list[list[int]], request: pytest.FixtureRequest
) -> AsyncIterator[tuple[Host, SchedulingPolicy]]:
    """An engine whose cache has too few blocks for both cases of GROWING."""
    from tests.fakes.tiny_llama import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS

    block_bytes = 2 * 4 * HEAD_DIM * NUM_KV_HEADS * NUM_LAYERS * BLOCK_SIZE
    policy: SchedulingPolicy = request.param
    config = VllmConfig(
        "fusion-1",
        1,
        model,
        "tiny",
        dtype="float32",
        block_size=BLOCK_SIZE,
        kv_cache_bytes=NUM_BLOCKS * block_bytes,
        staging_bytes=0,
        landing_bytes=0,
        max_model_len=400,
        max_num_batched_tokens=STEP_TOKENS,
        scheduling_policy=policy,
        async_scheduling=ASYNC_SCHEDULING,
    )
    async with running(config) as alone:
        assert alone.info.num_kv_blocks <= NUM_BLOCKS
        yield alone, policy


@pytest.mark.nightly
@pytest.mark.req("S83")
async def test_the_least_urgent_is_preempted_and_its_answer_is_that_of_plain_vllm(
    small: tuple[Host, SchedulingPolicy], expected: list[list[int]]
) -> None:
    """The preempted request ends last, because it needs the blocks of the other."""
    engine, policy = small
    batch = begin(engine, GROWING[0].prompt, GROWING[0].max_tokens, BATCH)
    urgent = begin(engine, GROWING[1].prompt, GROWING[1].max_tokens, URGENT)
    ended, answers = await in_order_of_end(engine, [batch, urgent])
    assert engine.engine.stats().extra["num_preempted"] >= 1
    assert differences(expected[2:], answers) == []
    victim = batch if policy is SchedulingPolicy.PRIORITY else urgent
    assert ended[-1] == victim
    await engine.until_idle()


@pytest.mark.req("S83")
async def test_no_prompt_stands_back_for_one_whose_blocks_it_holds(
    small: tuple[Host, SchedulingPolicy],
) -> None:
    """Otherwise, both requests would wait forever.

    The urgent request needs 12 of the 13 blocks. (vLLM uses one of NUM_BLOCKS as its null block.)
    """
    engine, _ = small
    under_way, urgent_prompt = prompts(11, [350, 380])
    before = engine.engine.stats().num_tokens
    batch = begin(engine, under_way, 1, BATCH)
    # A step may be counted only with the next step. The prompt's last step may have no next step.
    await until(
        lambda: (
            engine.engine.stats().num_tokens >= before + 2 * STEP_TOKENS
            or not engine.legs[batch].empty()
        )
    )
    with frozen(engine):
        urgent = begin(engine, urgent_prompt, 1, URGENT)
        await asyncio.sleep(0.2)  # wait until it is sent
    ended, _ = await in_order_of_end(engine, [batch, urgent])
    assert ended == [batch, urgent]
    await engine.until_idle()


@pytest.mark.nightly
@pytest.mark.req("S83")
async def test_prompts_that_pass_others_leave_handed_over_kv_whole(
    model: Path, expected: list[list[int]]
) -> None:
    """Requests of both classes run at once through a prefill and a decode. KV is handed over whole
    or per layer.
    """
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
        async_scheduling=ASYNC_SCHEDULING,
    )
    decode = replace(
        config, instance_id="decode-0", incarnation=2, staging_bytes=0, landing_bytes=32 << 20
    )
    async with running(config) as prefilling, running(decode) as decoding:
        urgent = Pair(prefilling, decoding, priority=URGENT)
        batch = Pair(prefilling, decoding, priority=BATCH)

        async def mixed(number: int, case: Case) -> list[int]:
            pair = batch if number % 2 else urgent
            generate = pair.generate if number % 4 < 2 else pair.generate_per_layer
            return await generate(case.prompt, case.sampling())

        todo = [(number, which) for number in range(4) for which in range(len(CASES))]
        random.Random(7).shuffle(todo)
        got = await asyncio.gather(*(mixed(number, CASES[which]) for number, which in todo))
        assert differences([expected[which] for _, which in todo], got) == []
        assert urgent.num_handed_over == batch.num_handed_over == len(todo) // 2
        await prefilling.until_idle()
        await decoding.until_idle()
