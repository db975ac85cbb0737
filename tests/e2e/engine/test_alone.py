"""One vLLM instance alone, and a hung engine process.

An instance does both phases if the other role is gone. A hung engine process does not answer pings.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from array import array

import pytest

from pdmesh.engine.base import Finished, Prefilled, PrefillJob, Sampling, Tokens
from pdmesh.engine.vllm.config import CPU_STEP_TOKENS
from tests.e2e.cases import differences
from tests.e2e.conftest import Reference
from tests.e2e.pair import Host, Pair

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="session"),
]
NUM_CASES = 12


async def generate_alone(
    pair: Pair, host: Host, prompt: tuple[int, ...], sampling: Sampling
) -> list[int]:
    leg = pair.next_leg(host)
    host.engine.prefill(PrefillJob(leg, f"r{leg}", 0, array("I", prompt), sampling))
    first = await host.next_output(leg)
    assert isinstance(first, Prefilled)
    tokens = [first.token]
    if first.finish_reason is None:
        while not isinstance(output := await host.next_output(leg), Finished):
            assert isinstance(output, Tokens), output
            tokens += output.token_ids
    del host.legs[leg]
    return tokens


@pytest.mark.req("S37", "S72")
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_either_role_alone_draws_what_plain_vllm_draws(
    pair: Pair, reference: Reference, role: str
) -> None:
    host = pair.prefill if role == "prefill" else pair.decode
    cases = reference.cases[:NUM_CASES]
    got = [await generate_alone(pair, host, case.prompt, case.sampling()) for case in cases]
    assert differences(reference.tokens[:NUM_CASES], got) == []
    await host.until_idle()


@pytest.mark.req("S33", "S34")
async def test_a_hung_engine_process_answers_no_ping_but_a_working_one_does(
    pair: Pair, reference: Reference
) -> None:
    engine = pair.decode.engine
    await asyncio.wait_for(engine.ping(), 30)
    case = reference.cases[0]
    busy = asyncio.create_task(pair.generate(case.prompt, case.sampling()))
    await asyncio.wait_for(engine.ping(), 60)
    await busy
    pids = engine.worker_pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    ping = asyncio.create_task(engine.ping())
    try:
        _, waiting = await asyncio.wait([ping], timeout=3.0)
        assert waiting, "a stopped process cannot have answered"
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    await asyncio.wait_for(ping, 60)
    assert await pair.generate(case.prompt, case.sampling()) == reference.tokens[0]


@pytest.mark.req("S33")
@pytest.mark.fault("F4")
async def test_a_worker_shows_each_layer_that_it_computes_and_nothing_while_it_is_frozen(
    pair: Pair,
) -> None:
    """During a step, which may take long, the engine answers no ping.

    The layers of the step show that the engine does not hang.
    """
    engine = pair.prefill.engine
    prompt = tuple(random.Random(5).randrange(100, 40_000) for _ in range(1500))
    before = engine.stats()
    await pair.prefilled(prompt, Sampling(max_tokens=1))
    after = engine.stats()
    num_steps = -(-len(prompt) // CPU_STEP_TOKENS) + 1
    assert after.num_signs - before.num_signs > num_steps, "steps alone would be fewer"
    assert before.num_tokens < after.num_tokens <= before.num_tokens + len(prompt)
    (pid,) = engine.worker_pids
    os.kill(pid, signal.SIGSTOP)
    try:
        leg = await pair.start_prefill((19, *prompt[1:]), Sampling(max_tokens=1))
        await asyncio.sleep(1.0)  # time for the signs that are in flight to arrive
        frozen = engine.stats().num_signs
        await asyncio.sleep(1.0)
        assert engine.stats().num_signs == frozen
    finally:
        os.kill(pid, signal.SIGCONT)
    assert isinstance(await pair.prefill.next_output(leg), Prefilled)
    del pair.prefill.legs[leg]
    assert engine.stats().num_signs > frozen
    await pair.prefill.until_idle()
