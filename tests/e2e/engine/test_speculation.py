"""Tokens that a decode looks up and checks are those it would have drawn, and the KV it was handed
is as good for it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdmesh.core.instance.speculation import Speculation
from tests.e2e.cases import differences, generate_all
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
    """Alone it proposes four, in company fewer, and none at its largest batch."""
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
