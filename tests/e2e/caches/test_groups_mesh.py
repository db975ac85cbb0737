"""A mesh draws the same tokens as plain vLLM, with models that have several kinds of layers.

Plain vLLM is vLLM without the mesh. Fewer bytes of a long prompt move than its blocks have. The
decode's checks of a ticket must allow this.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import pytest_asyncio

from pdmesh.engine.vllm.config import installed_device
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from tests.e2e.caches.test_latent_mesh import ask
from tests.e2e.caches.test_states import RIGHT_ROTATION
from tests.e2e.caches.tiny_stateful import write_tiny_lfm2
from tests.e2e.caches.tiny_windowed import WINDOW, write_tiny_gemma
from tests.e2e.cases import VOCABULARY, Case
from tests.e2e.conftest import plain_vllm
from tests.e2e.mesh.test_structured_output import PATIENCE, RESTART_S
from tests.support.sites import fleet

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(installed_device() != "cpu", reason="two engines on one GPU"),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="module"),
]
BLOCK_SIZE: Final = 32
MAX_MODEL_LEN: Final = 512
LENGTHS: Final = (1, 31, 32, 33, WINDOW - 1, WINDOW + 1, 3 * WINDOW, 3 * WINDOW + 7)
MAX_TOKENS: Final = 40
Expected = dict[tuple[int, ...], list[int]]


@dataclass(frozen=True, slots=True)
class Answered:
    """A model, and plain vLLM's answers by prompt, each cut at its first near-tie."""

    folder: Path
    expected: Expected


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(write_tiny_gemma, id="windows"),
        pytest.param(write_tiny_lfm2, id="states", marks=pytest.mark.nightly),
    ],
)
def model(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Answered:
    write: Callable[[Path], Path] = request.param
    folder = write(tmp_path_factory.mktemp("model"))
    for file in model_dir.glob("tokenizer*"):  # the model knows the tokenizer's first 40,960 tokens
        shutil.copy(file, folder)
    rng = random.Random(11)
    asked = [Case(tuple(rng.choices(VOCABULARY, k=n)), MAX_TOKENS) for n in LENGTHS]
    rotation: dict[str, Any] = RIGHT_ROTATION if request.param is write_tiny_lfm2 else {}
    with plain_vllm(
        folder,
        asked,
        tmp_path_factory.mktemp("plain"),
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory_bytes=64 << 20,
        **rotation,
    ) as plain:
        todo, answers = plain.cut(asked, 5e-4)
    both = zip(todo, answers, strict=True)
    return Answered(folder, {case.prompt: answer for case, answer in both if len(answer) > 1})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(model: Answered, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    env = {
        **PATIENCE,
        "PDMESH_BLOCK_SIZE": str(BLOCK_SIZE),
        "PDMESH_MAX_MODEL_LEN": str(MAX_MODEL_LEN),
        "PDMESH_KV_CACHE_BYTES": str(64 << 20),
    }
    spec = MeshSpec(
        engine="vllm",
        num_prefill=1,
        num_decode=1,
        http_port=0,
        grpc_port=0,
        model_dir=model.folder,
        dtype="float32",
        env=env,
        start_timeout_s=RESTART_S,
    )
    async with Mesh(spec, tmp_path_factory.mktemp("mesh")) as running:
        yield running


@pytest.mark.req("S1", "S3")
async def test_a_mesh_draws_what_plain_vllm_draws(mesh: Mesh, model: Answered) -> None:
    assert max(map(len, model.expected)) > 2 * WINDOW, "less than all blocks of a prompt moves"
    async with httpx.AsyncClient(timeout=600) as client:
        todo = model.expected.items()
        got = await asyncio.gather(*(ask(mesh, client, *each) for each in todo))
    assert [outcome.token_ids for outcome in got] == list(model.expected.values())
    await fleet.until_nothing_held(mesh, within_s=120)
