"""A prefill and a decode on vLLM draw the same greedy tokens as one plain vLLM, in fp32.

Plain vLLM is vLLM without the mesh. As a negative control, the comparison must fail if the decode
zeroes KV on arrival.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdmesh.core.kv.prefix.block_hash import block_hashes, token_array
from pdmesh.engine.base import Finished, Prefilled, PrefillJob, Sampling, Tokens
from tests.e2e.cases import differences, generate_all, longest, until_stop
from tests.e2e.conftest import Reference, decode_config
from tests.e2e.pair import Pair, running

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="session"),
]


@pytest.mark.req("S1", "S3", "S13", "S47", "S49")
async def test_outputs_equal_those_of_plain_vllm_and_decode_computes_no_prompt(
    pair: Pair, reference: Reference
) -> None:
    run = Pair(pair.prefill, pair.decode)
    pair.prefill.closed.clear()
    before = dict(pair.decode.engine.stats().extra)
    got = await generate_all(run.generate, reference.cases, num_concurrent=12)
    assert len(got) >= 200
    assert differences(reference.tokens, got) == []
    assert run.num_handed_over >= 180
    assert run.num_computed_at_decode == 0
    # vLLM counts token 1, which the prefill drew, as part of the decode's prompt. The decode must
    # compute nothing else of its prompt.
    after = pair.decode.engine.stats().extra
    counted = {name: after[name] - before[name] for name in after}
    assert counted["num_preempted"] == 0
    assert counted["num_prompt_tokens_computed"] == run.num_handed_over
    assert counted["num_prompt_tokens_pulled"] > 10_000
    assert counted["num_prompt_tokens_cached"] > 0, "shared prefixes are not pulled twice"
    assert pair.prefill.engine.stats().extra["num_prompt_tokens_cached"] > 0
    await pair.prefill.until_idle()
    await pair.decode.until_idle()
    assert set(pair.prefill.closed.values()) == {"taken"}


@pytest.mark.req("S1")
async def test_a_stop_token_ends_the_output_at_either_side(
    pair: Pair, reference: Reference
) -> None:
    todo = [i for i, tokens in enumerate(reference.tokens) if len(tokens) >= 3][:24]
    stops = [frozenset({reference.tokens[i][n % 3]}) for n, i in enumerate(todo)]
    expected = [until_stop(reference.tokens[i], stop) for i, stop in zip(todo, stops, strict=True)]
    assert any(len(tokens) == 1 for tokens in expected)
    got = await generate_all(pair.generate, [reference.cases[i] for i in todo], 8, stops)
    assert differences(expected, got) == []
    await pair.prefill.until_idle()


@pytest.mark.req("S72")
async def test_a_local_job_draws_the_same_tokens(pair: Pair, reference: Reference) -> None:
    host = pair.prefill

    async def generate(prompt: object, sampling: Sampling) -> list[int]:
        assert isinstance(prompt, tuple)
        leg = pair.next_leg(host)
        host.engine.prefill(PrefillJob(leg, "r", 0, token_array(prompt), sampling))
        first = await host.next_output(leg)
        assert isinstance(first, Prefilled)
        tokens, is_over = [first.token], first.finish_reason is not None
        while not is_over:
            output = await host.next_output(leg)
            is_over = isinstance(output, Finished)
            if isinstance(output, Tokens):
                tokens += output.token_ids
        return tokens

    got = await generate_all(generate, reference.cases[:20], num_concurrent=8)
    assert differences(reference.tokens[:20], got) == []
    await host.until_idle()


@pytest.mark.req("S80")
async def test_stored_blocks_are_reported_by_their_mesh_names(
    pair: Pair, reference: Reference
) -> None:
    prompt = longest(reference.cases)
    await pair.generate(prompt, Sampling(max_tokens=3))
    names = set(block_hashes(bytes.fromhex(pair.root()), prompt, pair.prefill.info.block_size))
    assert len(names) == 9
    await pair.prefill.until(lambda: names <= pair.prefill.blocks)
    await pair.decode.until(lambda: names <= pair.decode.blocks)


@pytest.mark.req("S80")
async def test_nothing_is_shared_under_another_salt(pair: Pair, reference: Reference) -> None:
    prompt = longest(reference.cases)
    again = await pair.prefilled(prompt, Sampling(max_tokens=1))
    other = await Pair(pair.prefill, pair.decode, salt="another").prefilled(
        prompt, Sampling(max_tokens=1)
    )
    assert again.num_cached_tokens == 576
    assert other.num_cached_tokens == 0
    assert other.token == again.token


@pytest.mark.req("S77")
async def test_the_comparison_fails_when_the_kv_is_zeroed_on_arrival(
    pair: Pair, reference: Reference, model_dir: Path
) -> None:
    config = replace(
        decode_config(model_dir),
        instance_id="decode-1",
        kv_cache_bytes=128 << 20,
        failpoints="decode.pulled=zero-kv",
    )
    todo = [i for i, case in enumerate(reference.cases) if case.max_tokens >= 5][:40]
    async with running(config) as decode:
        broken = Pair(pair.prefill, decode)
        got = await generate_all(broken.generate, [reference.cases[i] for i in todo], 8)
    wrong = differences([reference.tokens[i] for i in todo], got)
    assert len(wrong) > len(todo) // 2
