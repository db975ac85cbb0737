"""Tests a prefill that is slow but works. Requests wait in its queue even beyond the target for the
first token (S9), and no process may take the prefill for dead.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdmesh.launcher.mesh import Mesh
from tests.support.sites import fleet
from tests.support.streams import StreamOutcome, stream_completion
from tests.support.waiting import until

NUM_TOKENS = 4
LENGTHS = (3900, 3900, 3300, 20)


@pytest.mark.req("S9", "S33")
@pytest.mark.fault("F4")
async def test_a_short_prompt_behind_long_ones_waits_for_them_and_nothing_is_declared_dead(
    tmp_path: Path,
) -> None:
    """One prefill computes 11,120 tokens in order of arrival. This takes longer than the target and
    the stall bound together. A gateway that expected twenty tokens to be quick would take the
    prefill for dead, and would send the same work to another instance.
    """
    spec = fleet.one_by_one(
        PDMESH_SIM_LAW="smollm2-cpu",
        PDMESH_GATEWAY_TTFT_S="0.5",
        PDMESH_GATEWAY_STALL_S="5",
        PDMESH_LOG_FORMAT="json",
    )
    async with Mesh(spec, tmp_path / "mesh") as mesh, httpx.AsyncClient(timeout=120) as client:
        reference = fleet.Reference.load(mesh.state_dir / "reference")
        prefill = (await fleet.addresses(mesh))["prefill-0"]
        prompts = [[40 + (n * 13 + i * i) % 80 for i in range(n)] for n in LENGTHS]

        async def ask(prompt: list[int]) -> StreamOutcome:
            return await stream_completion(
                client, mesh.http_url, prompt, NUM_TOKENS, ignore_eos=True
            )

        async def are_accepted() -> bool:
            answer = await fleet.status(prefill)
            return answer is not None and answer.load.num_slots_used >= len(LENGTHS) - 1

        asked = [asyncio.create_task(ask(prompt)) for prompt in prompts[:-1]]
        await until(are_accepted)
        asked.append(asyncio.create_task(ask(prompts[-1])))
        outcomes = await asyncio.wait_for(asyncio.gather(*asked), 120)
        ends: list[dict[str, Any]] = []

        def are_logged() -> bool:
            """A request's log line comes after its answer."""
            log = (mesh.state_dir / "logs" / "gateway-0.log").read_text()
            lines = [json.loads(x) for x in log.splitlines() if '"request.finished"' in x]
            ends[:] = [line for line in lines if line["num_prompt_tokens"] in LENGTHS]
            return len(ends) >= len(LENGTHS)

        await until(are_logged)
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        assert outcome.is_complete, (outcome.status, outcome.error)
        assert outcome.text == reference.text(prompt, NUM_TOKENS)
    moves = Counter(end["num_migrations"] for end in ends)
    assert moves == {0: len(LENGTHS)}
