"""One engine of two pipeline stages hands prompts over to itself.

The answers must equal those of plain vLLM, which is vLLM without the mesh, on one rank. The engine
decodes a prompt under another salt than it used for the prefill. So it finds nothing in its own
cache, and pulls all KV. `test_pair.py` has two engines and runs nightly.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from pdmesh.engine.base import Sampling
from tests.e2e.cases import differences, generate_all
from tests.e2e.conftest import Plain
from tests.e2e.pair import Pair, running
from tests.e2e.pipeline import test_pair as pairs
from tests.e2e.pipeline.test_pair import NUM_CONCURRENT, NUM_STAGES, config, stage_cases

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="module"),
]
tiny_llama, plain = pairs.tiny_llama, pairs.plain  # these are fixtures


@pytest.mark.req("S120", "S1", "S57")
async def test_stages_pull_their_own_layers_and_draw_what_plain_vllm_draws(
    tiny_llama: Path, plain: Plain
) -> None:
    async with running(config(tiny_llama, "fusion-0", 1)) as host:
        assert len(set(host.info.kv_addresses)) == host.info.num_ranks == NUM_STAGES
        gives, takes = Pair(host, host, salt="gives"), Pair(host, host, salt="takes")

        async def generate(prompt: Sequence[int], sampling: Sampling) -> list[int]:
            first = await gives.prefilled(prompt, sampling)
            if first.ticket is None:
                return [first.token]
            return [first.token, *await takes.decoded(prompt, first.token, first.ticket, sampling)]

        todo, expected = plain.decided(stage_cases())
        assert differences(expected, await generate_all(generate, todo, NUM_CONCURRENT)) == []
        assert takes.num_computed_at_decode == 0
        assert takes.num_handed_over == sum(case.max_tokens > 1 for case in todo)
        assert takes.last_received is not None
        assert takes.last_received.kv_bytes > 0, "it pulled"
        await host.until_idle()
