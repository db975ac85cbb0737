"""Tests that the KV of an answer moves from the decode's host pool to the prefill's host pool. A
host pool holds KV blocks in host memory. The prefill then reuses the KV in the next turn of the
chat.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest_asyncio

from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from tests.support.sites.fleet import counted
from tests.support.waiting import until

ASKED = [{"role": "user", "content": "Say on. " * 20}]
BLOCK, NUM_ANSWER = 64, 200
ENV = {
    "PDMESH_SIM_EOS_PERIOD": "0",
    "PDMESH_SIM_LAW": "smollm2-cpu",  # computing costs more than fetching, as on a real engine
    "PDMESH_KV_HOST_POOL_BYTES": str(16 << 20),
    "PDMESH_KV_PEER_POOLS": "true",
}


@pytest_asyncio.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    spec = MeshSpec(engine="sim", num_prefill=1, num_decode=1, http_port=0, grpc_port=0, env=ENV)
    async with Mesh(spec, tmp_path) as running:
        yield running


async def told(
    client: httpx.AsyncClient, mesh: Mesh, messages: list[Any], **fields: Any
) -> tuple[Any, int, int]:
    """The answer's message, the number of tokens in the prompt, and how many of them were
    cached.
    """
    body = {"model": "default", "messages": messages, "max_tokens": NUM_ANSWER, "temperature": 0}
    answer = await client.post(f"{mesh.http_url}/v1/chat/completions", json=body | fields)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return answer.json()["choices"][0]["message"], usage["prompt_tokens"], cached


async def test_the_next_turn_computes_no_full_block_of_the_answer_again(mesh: Mesh) -> None:
    """The simulated engine draws from the bytes in its memory. With wrong bytes, the answer would
    differ.
    """
    async with httpx.AsyncClient(timeout=60) as client:
        messages: list[Any] = list(ASKED)
        answer, num_prompt, _ = await told(client, mesh, messages)
        await until(
            lambda: counted(mesh, ["prefill-0"], "pdmesh_kv_tier_load_seconds_total", tier="peer")
        )
        messages += [answer, {"role": "user", "content": "And then?"}]
        later, num_later, num_cached = await told(client, mesh, messages)
        assert num_later > num_prompt + NUM_ANSWER
        num_known = num_prompt + NUM_ANSWER - 1  # the last token of the answer has no KV
        assert num_cached == num_known // BLOCK * BLOCK
        assert num_cached > num_prompt + BLOCK

        computed, _, num_cached = await told(client, mesh, messages, cache_salt="another")
        assert num_cached == 0
        assert computed == later
