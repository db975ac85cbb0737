"""A decode with speculation draws the same tokens as without, also with handed-over KV."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from pdmesh.core.speculation.schedule import PROBE_EVERY, Speculation
from pdmesh.engine.base import Sampling
from tests.e2e.cases import VOCABULARY, differences, generate_all
from tests.e2e.conftest import Reference, decode_config
from tests.e2e.pair import Pair, running

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM's own
    pytest.mark.asyncio(loop_scope="session"),
]


@pytest.mark.req("S118")
async def test_a_decode_that_proposes_tokens_draws_what_plain_vllm_draws(
    pair: Pair, reference: Reference, model_dir: Path
) -> None:
    """One request gets four proposals, several get fewer, and the largest batch gets none."""
    speculation = Speculation(4, 0.6, 0.05)
    assert {count for _, _, count in speculation.schedule(32)} >= {4, 1, 0}
    config = replace(
        decode_config(model_dir), instance_id="decode-s", max_num_seqs=32, speculation=speculation
    )
    async with running(config) as decode:
        run = Pair(pair.prefill, decode)
        todo = reference.cases[:60]
        got = await generate_all(run.generate, todo[:20], num_concurrent=1)
        got += await generate_all(run.generate, todo[20:], num_concurrent=30)
        assert differences(reference.tokens[:60], got) == []
        assert run.num_handed_over >= 40
        assert run.num_computed_at_decode == 0
        await decode.until_idle()
    await pair.prefill.until_idle()


@pytest.mark.req("S118")
async def test_a_decode_without_a_schedule_proposes_tokens_for_repetitive_text(
    pair: Pair, model_dir: Path
) -> None:
    """Its schedule is all zeros, so it proposes only tries, and more where measurements allow."""
    speculation = Speculation(4, 0.0, 0.001)
    assert speculation.schedule(8) == [(1, 8, 0)]
    config = replace(
        decode_config(model_dir), instance_id="decode-s", max_num_seqs=8, speculation=speculation
    )
    async with running(config) as decode:
        run = Pair(pair.prefill, decode)
        rng = random.Random(3)
        prompts = [rng.choices(VOCABULARY, k=6) * 40 for _ in range(8)]
        answers = await asyncio.gather(*(run.generate(p, Sampling(256)) for p in prompts))
        counted = decode.engine.stats().extra
        num_repeated = sum(answer[100:160] == answer[106:166] for answer in answers)
        assert num_repeated >= 2, "the model continues the repetition"
        num_steps = 256
        assert counted["num_proposed_tokens"] > 8 * 4 * num_steps / PROBE_EVERY
        assert counted["num_accepted_tokens"] > counted["num_proposed_tokens"] / 2
        await decode.until_idle()
    await pair.prefill.until_idle()
