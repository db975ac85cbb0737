"""A hand-over between vLLM engines that is aborted, fails, is preempted, or loses its worker."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from pdmesh.engine.base import Failed, Sampling, Ticket
from pdmesh.errors import EngineFailed
from tests.e2e.aborts import aborts_beside
from tests.e2e.cases import differences, generate_all, longest
from tests.e2e.conftest import Reference, decode_config
from tests.e2e.pair import LegFailed, Pair, running

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="session"),
]
GREEDY = Sampling(max_tokens=8)


async def staged(pair: Pair, prompt: tuple[int, ...]) -> tuple[int, Ticket]:
    first = await pair.prefilled(prompt, GREEDY)
    assert first.ticket is not None
    return first.token, first.ticket


@pytest.mark.req("S49")
@pytest.mark.fault("F27")
async def test_aborts_at_any_moment_free_everything_and_harm_no_other_request(
    pair: Pair, reference: Reference
) -> None:
    long_prompts = [case.prompt for case in reference.cases if len(case.prompt) > 100][:4]
    async with aborts_beside(pair, long_prompts):
        got = await generate_all(pair.generate, reference.cases[:60], num_concurrent=6)
    assert differences(reference.tokens[:60], got) == []
    await pair.prefill.until_idle()
    await pair.decode.until_idle()


@pytest.mark.req("S77")
@pytest.mark.fault("F7")
async def test_a_ticket_that_is_gone_fails_the_leg_and_computes_nothing(
    pair: Pair, reference: Reference
) -> None:
    prompt = longest(reference.cases)[:300]
    token, ticket = await staged(pair, prompt)
    pair.prefill.engine.release(ticket.ticket_id)
    await pair.prefill.until_idle()
    with pytest.raises(LegFailed) as caught:
        await pair.decoded((9, *prompt[1:]), token, ticket, GREEDY)
    assert caught.value.reason == "KV_TRANSFER_FAILED"
    await pair.decode.until_idle()
    assert (
        await pair.generate(reference.cases[0].prompt, reference.cases[0].sampling())
        == (reference.tokens[0])
    )


@pytest.mark.req("S77")
async def test_a_frozen_sender_fails_the_leg_at_its_deadline(
    pair: Pair, reference: Reference
) -> None:
    prompt = (11, *longest(reference.cases)[1:400])
    token, ticket = await staged(pair, prompt)
    (pid,) = pair.prefill.engine.worker_pids
    os.kill(pid, signal.SIGSTOP)
    try:
        leg = await pair.start_decode(prompt, token, ticket, GREEDY, deadline_s=1.0)
        async with asyncio.timeout(4):
            failed = await pair.decode.next_output(leg)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert isinstance(failed, Failed)
    assert failed.reason in {"KV_TRANSFER_FAILED", "KV_TRANSFER_TIMEOUT"}
    pair.prefill.engine.release(ticket.ticket_id)
    await pair.prefill.until_idle()
    await pair.decode.until_idle()


async def test_preempted_decodes_draw_the_same_tokens_and_a_lost_worker_is_noticed(
    pair: Pair, reference: Reference, model_dir: Path
) -> None:
    """The cache has few blocks. Eight prompts of one block each grow until some are preempted."""
    config = replace(
        decode_config(model_dir),
        instance_id="decode-2",
        kv_cache_bytes=14 * 64 * pair.decode.info.kv_bytes_per_token,
        max_model_len=512,
    )
    async with running(config) as decode:
        small = Pair(pair.prefill, decode)
        got = await generate_all(small.generate, reference.long_cases, num_concurrent=8)
        assert decode.engine.stats().extra["num_preempted"] > 0
        assert differences(reference.long_tokens, got) == []
        await decode.until_idle()
        os.kill(decode.engine.worker_pids[0], signal.SIGKILL)
        with pytest.raises(EngineFailed):
            await asyncio.wait_for(decode.ended, 5)
