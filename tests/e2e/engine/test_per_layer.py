"""KV is handed over per layer between two vLLM engines, also beside aborted requests (S48)."""

from __future__ import annotations

import asyncio
import random

import pytest

from pdmesh.engine.base import Failed, Sampling, TicketOpened
from tests.e2e.cases import VOCABULARY, differences, generate_all, longest, until_stop
from tests.e2e.conftest import Reference
from tests.e2e.pair import Pair

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="session"),
]


@pytest.mark.req("S48", "S51")
async def test_outputs_equal_those_of_plain_vllm_and_decode_computes_no_prompt(
    pair: Pair, reference: Reference
) -> None:
    """Prompts have lengths around block boundaries, and some share prefixes. For some prompts,
    token 1 is the last token of a full block.
    """
    run = Pair(pair.prefill, pair.decode, salt="per-layer")
    before = dict(pair.decode.engine.stats().extra)
    got = await generate_all(run.generate_per_layer, reference.cases, num_concurrent=12)
    assert differences(reference.tokens, got) == []
    assert run.num_handed_over >= 180
    assert run.num_computed_at_decode == 0
    after = pair.decode.engine.stats().extra
    counted = {name: after[name] - before[name] for name in after}
    assert counted["num_prompt_tokens_computed"] == run.num_handed_over
    assert counted["num_prompt_tokens_pulled"] > 10_000
    await pair.prefill.until_idle()
    await pair.decode.until_idle()


@pytest.mark.req("S48")
async def test_whole_and_per_layer_do_not_disturb_each_other(
    pair: Pair, reference: Reference
) -> None:
    todo = [i for i, case in enumerate(reference.cases) if case.max_tokens > 2][:60]
    run = Pair(pair.prefill, pair.decode, salt="mixed")
    turn = iter(range(len(todo)))

    async def either(prompt: object, sampling: Sampling) -> list[int]:
        assert isinstance(prompt, tuple)
        generate = run.generate if next(turn) % 2 else run.generate_per_layer
        return await generate(prompt, sampling)

    got = await generate_all(either, [reference.cases[i] for i in todo], num_concurrent=12)
    assert differences([reference.tokens[i] for i in todo], got) == []
    await pair.prefill.until_idle()
    await pair.decode.until_idle()


@pytest.mark.req("S48")
async def test_a_stop_token_ends_the_output_at_either_side(
    pair: Pair, reference: Reference
) -> None:
    todo = [i for i, tokens in enumerate(reference.tokens) if len(tokens) >= 3][:24]
    stops = [frozenset({reference.tokens[i][n % 3]}) for n, i in enumerate(todo)]
    expected = [until_stop(reference.tokens[i], stop) for i, stop in zip(todo, stops, strict=True)]
    run = Pair(pair.prefill, pair.decode, salt="stops")
    cases = [reference.cases[i] for i in todo]
    got = await generate_all(run.generate_per_layer, cases, 8, stops)
    assert differences(expected, got) == []
    await pair.prefill.until_idle()
    await pair.decode.until_idle()


@pytest.mark.fault("F27")
async def test_requests_given_up_at_any_moment_free_everything_and_harm_no_other(
    pair: Pair, reference: Reference
) -> None:
    """The decode, or the prefill and then the decode, is aborted after a random time. Other
    requests continue.
    """
    rng = random.Random(5)
    run = Pair(pair.prefill, pair.decode, salt="aborts")

    async def give_up(after_s: float, which: str) -> None:
        prompt = rng.choices(VOCABULARY, k=rng.randint(1, 500))
        prefill = await run.start_prefill(prompt, Sampling(max_tokens=40), is_per_layer=True)
        opened = await run.prefill.next_output(prefill)
        assert isinstance(opened, TicketOpened)
        decode = await run.start_decode(prompt, None, opened.ticket, Sampling(max_tokens=40))
        await asyncio.sleep(after_s)
        if which == "prefill":
            run.prefill.abort(prefill)
            await asyncio.sleep(0.01)
            run.decode.abort(decode)
        else:
            run.decode.abort(decode)
            run.prefill.abort(prefill)

    some = [c for c in reference.cases if c.max_tokens > 2][:24]
    expected = [reference.tokens[reference.cases.index(case)] for case in some]
    whiches = [("both", "prefill")[n % 2] for n in range(40)]
    results = await asyncio.gather(
        generate_all(run.generate_per_layer, some, 6),
        *(give_up(rng.random() * 0.4, which) for which in whiches),
    )
    assert results[0] is not None
    assert differences(expected, results[0]) == []
    await pair.prefill.until_idle()
    await pair.decode.until_idle()


@pytest.mark.fault("F2")
async def test_a_prefill_that_gives_up_fails_its_decode(pair: Pair, reference: Reference) -> None:
    run = Pair(pair.prefill, pair.decode, salt="gives-up")
    prompt = [*longest(reference.cases), *longest(reference.cases)]
    prefill = await run.start_prefill(prompt, Sampling(max_tokens=9), is_per_layer=True)
    opened = await run.prefill.next_output(prefill)
    assert isinstance(opened, TicketOpened)
    decode = await run.start_decode(prompt, None, opened.ticket, Sampling(max_tokens=9))
    run.prefill.abort(prefill)
    failed = await run.decode.next_output(decode)
    assert isinstance(failed, Failed)
    assert failed.reason == "KV_TRANSFER_FAILED"
    await pair.prefill.until_idle()
    await pair.decode.until_idle()


@pytest.mark.req("S48")
async def test_a_prompt_whose_kv_decode_already_holds_waits_for_token_1(
    pair: Pair, reference: Reference
) -> None:
    """The decode pulls no KV, so vLLM could compute at once, although token 1 is not known yet."""
    run = Pair(pair.prefill, pair.decode, salt="known")
    prompt = longest(reference.cases)[:512]
    sampling = Sampling(max_tokens=6)
    expected = await run.generate(prompt, sampling)
    assert await run.generate_per_layer(prompt, sampling) == expected
    assert run.last_received is not None
    assert run.last_received.kv_bytes == 0, "the decode already held every block"
    await pair.prefill.until_idle()
    await pair.decode.until_idle()
