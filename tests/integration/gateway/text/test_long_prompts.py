"""Tests that a gateway serves other requests while it computes the block names of a long prompt."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdmesh.core.kv.prefix.kept_hashes import CHUNK_BLOCKS
from pdmesh.core.tenancy.limits import ANYONE
from pdmesh.services.gateway.openai.calls import completion_spec
from pdmesh.services.gateway.openai.schema import CompletionRequest
from pdmesh.v1.common_pb2 import ROLE_DECODE, ROLE_PREFILL
from tests.fakes.fake_instance import FakeInstance
from tests.fakes.gateway_mesh import gateway_mesh


@pytest.mark.parametrize("num_chunks", [0, 12])
async def test_others_have_turns_while_the_blocks_of_a_long_prompt_are_named(
    tmp_path: Path, num_chunks: int
) -> None:
    async with gateway_mesh(tmp_path) as mesh:
        for role, name in ((ROLE_PREFILL, "prefill-9"), (ROLE_DECODE, "decode-9")):
            await mesh.add(FakeInstance(role, name, model="long", max_model_len=1 << 20))
        frontend = mesh.gateway.frontend
        record = frontend.shared.fleet.reference("long")
        assert record is not None
        num_tokens = 8 + num_chunks * CHUNK_BLOCKS * record.block_size
        request = CompletionRequest(model="long", prompt=[5] * num_tokens, max_tokens=1)
        spec = await completion_spec(request, frontend, ANYONE)
        num_turns, loop = 0, asyncio.get_running_loop()

        def turn() -> None:
            nonlocal num_turns
            num_turns += 1
            loop.call_soon(turn)

        loop.call_soon(turn)
        (prompt,) = (await frontend.prepare(spec)).prompts
        assert num_turns == num_chunks // 4
        assert len(frontend.shared.kept_hashes) == num_chunks
        assert len(prompt.hashes(record)) == num_tokens // record.block_size
