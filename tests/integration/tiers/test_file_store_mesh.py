"""Tests the file store of KV blocks in a whole mesh (S105). Stored blocks must survive when their
writer is killed with SIGKILL. The writer's next incarnation must load the blocks and not compute
them.
"""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import httpx
import pytest

from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from tests.support.sites import fleet
from tests.support.waiting import until

BLOCK_TOKENS, NUM_BLOCKS = 64, 9
NUM_PROMPTS, MAX_TOKENS = 6, 4


def spec(store: Path) -> MeshSpec:
    return MeshSpec(
        engine="sim",
        num_prefill=1,
        num_decode=1,
        http_port=0,
        grpc_port=0,
        env={
            # Computing takes so long that it pays to wait for a busy disk.
            "PDMESH_SIM_LAW": "smollm2-cpu",
            "PDMESH_KV_FILE_STORE_DIR": str(store),
            "PDMESH_KV_TIER_TIMEOUT_S": "20",
        },
        start_timeout_s=180,
    )


def prompt_of(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(40, 120) for _ in range(NUM_BLOCKS * BLOCK_TOKENS + 7)]


async def ask(client: httpx.AsyncClient, prompt: list[int]) -> tuple[str, int]:
    """The answer's text, and how many tokens of the prompt were not computed."""
    asked = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    response = await client.post("/v1/completions", json={"model": "default"} | asked)
    assert response.status_code == 200, response.text
    answer = response.json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["text"], cached


def counted(mesh: Mesh, event: str) -> float:
    """The number of blocks that the file tier of the prefill has counted for this event."""
    labels = {"tier": "file", "event": event}
    return sum(
        value
        for name, found, value in fleet.samples(mesh, "prefill-0")
        if name == "pdmesh_kv_tier_blocks_total" and labels.items() <= found.items()
    )


@pytest.mark.req("S105", "S68", "S76")
@pytest.mark.fault("F2")
async def test_stored_blocks_are_loaded_after_a_kill_and_not_computed_again(
    tmp_path: Path,
) -> None:
    reference = fleet.Reference.load(tmp_path / "model")
    store = tmp_path / "store"
    prompts = [prompt_of(seed) for seed in range(NUM_PROMPTS)]
    async with (
        Mesh(spec(store), tmp_path / "mesh") as mesh,
        httpx.AsyncClient(base_url=mesh.http_url, timeout=60) as client,
    ):
        for prompt in prompts:
            assert await ask(client, prompt) == (reference.text(prompt, MAX_TOKENS), 0)
        await until(lambda: counted(mesh, "stored") >= NUM_PROMPTS * NUM_BLOCKS)
        acknowledged = set(store.rglob("*.kv"))
        assert len(acknowledged) >= NUM_PROMPTS * NUM_BLOCKS

        before = mesh.pid("prefill-0")
        writing = [asyncio.create_task(ask(client, prompt_of(100 + n))) for n in range(8)]
        await until(lambda: len(set(store.rglob("*.kv")) - acknowledged) > 0)
        mesh.kill("prefill-0", signal.SIGKILL)  # some writes are under way
        for text, _ in await asyncio.gather(*writing):
            assert text, "requests in flight end on another instance, or later"
        await mesh.wait_ready(["prefill-0"], timeout_s=180)
        assert mesh.pid("prefill-0") != before
        assert acknowledged <= set(store.rglob("*.kv")), "every acknowledged block is there"

        torn, *whole = prompts
        num_loaded = 0
        for prompt in whole:
            text, num_cached = await ask(client, prompt)
            assert text == reference.text(prompt, MAX_TOKENS)
            num_loaded += num_cached == NUM_BLOCKS * BLOCK_TOKENS
        # If the machine stalls for longer than computing takes, the prefill computes a prompt. That
        # is correct, but this test is about loading.
        assert num_loaded >= len(whole) - 2
        await until(lambda: counted(mesh, "served") >= num_loaded * NUM_BLOCKS)

        for path in store.rglob("*.kv"):  # cut the files off, as a machine that dies may do
            with path.open("r+b") as file:
                file.truncate(100)
        assert await ask(client, torn) == (reference.text(torn, MAX_TOKENS), 0)
        assert counted(mesh, "corrupt") >= 1
