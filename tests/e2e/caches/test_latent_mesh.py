"""Latent attention (MLA) through a mesh on CPUs, with a host pool, and after a decode is killed."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import httpx
import pytest
import pytest_asyncio

from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from tests.chaos.test_kill_matrix import KILL
from tests.e2e.caches.test_latent import BLOCK_SIZE, ENGINE_ARGS, HAS_GPU, MAX_MODEL_LEN
from tests.e2e.caches.tiny_latent import write_tiny_deepseek
from tests.e2e.cases import VOCABULARY, Case
from tests.e2e.conftest import plain_vllm
from tests.e2e.mesh.test_faults_and_load import cached_tokens
from tests.e2e.mesh.test_structured_output import PATIENCE, RESTART_S, num_admitted
from tests.support.sites import fleet
from tests.support.streams import StreamOutcome, stream_completion
from tests.support.waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(HAS_GPU, reason="three engines on one GPU, and a kernel for CPUs"),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="module"),
]
LENGTHS: Final = (1, 15, 16, 17, 64, 90, 150, 200, 250, 300)
MAX_TOKENS: Final = 160
VICTIM: Final = "decode-0"


@pytest.fixture(scope="module")
def latent_model(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with SmolLM2's tokenizer. The model knows the tokenizer's first 40,960 tokens."""
    folder = write_tiny_deepseek(tmp_path_factory.mktemp("model"))
    for file in model_dir.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def expected(
    latent_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[int, ...], list[int]]:
    """Plain vLLM's answers by prompt, each cut at its first near-tie.

    At a near-tie, two tokens are almost equally likely, so rounding may decide.
    """
    rng = random.Random(3)
    asked = [Case(tuple(rng.choices(VOCABULARY, k=n)), MAX_TOKENS) for n in LENGTHS]
    with plain_vllm(
        latent_model,
        asked,
        tmp_path_factory.mktemp("plain"),
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory_bytes=64 << 20,
        **ENGINE_ARGS,
    ) as plain:
        todo, answers = plain.decided(asked)
    return {case.prompt: answer for case, answer in zip(todo, answers, strict=True)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    latent_model: Path,
    expected: dict[tuple[int, ...], list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Mesh]:
    env = {
        **PATIENCE,
        "PDMESH_BLOCK_SIZE": str(BLOCK_SIZE),
        "PDMESH_MAX_MODEL_LEN": str(MAX_MODEL_LEN),
        "PDMESH_KV_CACHE_BYTES": str(64 << 20),
        "PDMESH_PREFILL_KV_HOST_POOL_BYTES": str(192 << 20),
        "PDMESH_KV_TIER_TIMEOUT_S": "30",
        "PDMESH_PREFILL_NUM_SLOTS": "16",
        "PDMESH_DECODE_NUM_SLOTS": "16",
    }
    spec = MeshSpec(
        engine="vllm",
        num_prefill=1,
        num_decode=2,
        http_port=0,
        grpc_port=0,
        model_dir=latent_model,
        dtype="float32",
        engine_args=ENGINE_ARGS,
        env=env,
        start_timeout_s=RESTART_S,
    )
    async with Mesh(spec, tmp_path_factory.mktemp("mesh")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=600) as running:
        yield running


async def ask(
    mesh: Mesh, client: httpx.AsyncClient, prompt: tuple[int, ...], answer: list[int]
) -> StreamOutcome:
    return await stream_completion(
        client, mesh.http_url, prompt, len(answer), ignore_eos=True, return_token_ids=True
    )


def num_migrations(mesh: Mesh) -> float:
    """The number of migrations, in which a request that lost a leg continues elsewhere."""
    found = fleet.samples(mesh, "gateway-0")
    return sum(value for name, _, value in found if name == "pdmesh_request_migrations_total")


@pytest.mark.req("S1", "S3", "S76")
async def test_a_mesh_draws_what_plain_vllm_draws_and_its_pool_keeps_prefixes(
    mesh: Mesh, client: httpx.AsyncClient, expected: dict[tuple[int, ...], list[int]]
) -> None:
    for _ in range(2):
        got = await asyncio.gather(*(ask(mesh, client, *each) for each in expected.items()))
        assert [outcome.token_ids for outcome in got] == list(expected.values())
    longest = max(expected, key=len)
    assert (
        await cached_tokens(mesh, client, longest) == (len(longest) - 1) // BLOCK_SIZE * BLOCK_SIZE
    )
    await fleet.until_nothing_held(mesh, within_s=120)


@pytest.mark.req("S37", "S74")
@pytest.mark.fault("F7")
async def test_answers_go_on_at_the_other_decode_when_one_is_killed(
    mesh: Mesh, client: httpx.AsyncClient, expected: dict[tuple[int, ...], list[int]]
) -> None:
    enough = num_admitted(mesh, VICTIM) + 2
    streams = [asyncio.create_task(ask(mesh, client, *each)) for each in expected.items()]
    await until(lambda: num_admitted(mesh, VICTIM) >= enough)
    before = num_migrations(mesh)
    mesh.kill(VICTIM, KILL)
    got = await asyncio.wait_for(asyncio.gather(*streams), RESTART_S)
    assert all(outcome.is_complete for outcome in got)
    assert [outcome.token_ids for outcome in got] == list(expected.values())
    assert num_migrations(mesh) > before
    await mesh.wait_ready([VICTIM], RESTART_S)
    await fleet.until_nothing_held(mesh, within_s=120)
