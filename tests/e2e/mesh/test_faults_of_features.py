"""Faults in two vLLM meshes with different features.

Every answer must equal the answer of plain vLLM, which is vLLM without the mesh. The first mesh has
an encoder for images, and speculation. The second mesh schedules steps ahead, which vLLM combines
with neither of these features. Times are judged on the simulated engine (tests/chaos).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import pytest_asyncio

from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from tests.chaos.test_kill_matrix import Case as Fault
from tests.chaos.test_kill_matrix import hit
from tests.e2e.images import test_mesh as images
from tests.e2e.mesh import test_faults_and_load as texts
from tests.e2e.mesh.test_structured_output import PATIENCE, RESTART_S
from tests.support.images.encoders import until_encoding
from tests.support.sites import fleet
from tests.support.waiting import until

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="module"),
]
PREFILLS: Final = ("prefill-0", "prefill-1")
DECODES: Final = ("decode-0", "decode-1")
NUM_ROUNDS: Final = 3  # rounds with all prompts at once
# A failpoint must be hit within so many rounds. Not every request reaches its process.
MAX_ROUNDS: Final = 8
_SALTS: Final = itertools.count()

model = images.model  # these are fixtures
shown = images.expected


@pytest.fixture(scope="module")
def text_model(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return texts.written_model(model_dir, tmp_path_factory)


@pytest.fixture(scope="module")
def told(
    text_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[int, ...], list[int]]:
    return texts.plain_answers(text_model, tmp_path_factory)


@dataclass(frozen=True)
class Site:
    mesh: Mesh
    client: httpx.AsyncClient
    path: str
    asked: Sequence[dict[str, Any]]
    answers: Sequence[list[int]]

    def body(self, number: int) -> dict[str, Any]:
        """A request with a new salt, so that no prompt finds KV of earlier requests."""
        return dict(self.asked[number]) | {"cache_salt": str(next(_SALTS))}

    async def ask(self, number: int) -> None:
        response = await self.client.post(self.path, json=self.body(number))
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["token_ids"] == self.answers[number]

    def asking(self, num_rounds: int) -> asyncio.Future[list[None]]:
        prompts = range(len(self.asked))
        return asyncio.gather(*(self.ask(n) for n in prompts for _ in range(num_rounds)))

    def counted(self, names: Sequence[str], metric: str, **labels: str) -> float:
        return fleet.counted(self.mesh, names, metric, **labels)

    async def is_whole_again(self) -> None:
        await self.mesh.wait_ready(timeout_s=RESTART_S)
        await self.asking(1)
        await fleet.until_nothing_held(self.mesh, within_s=120)


@asynccontextmanager
async def started(spec: MeshSpec, folder: Path) -> AsyncIterator[tuple[Mesh, httpx.AsyncClient]]:
    async with (
        Mesh(spec, folder) as mesh,
        httpx.AsyncClient(base_url=mesh.http_url, timeout=600) as client,
    ):
        yield mesh, client


@asynccontextmanager
async def pictures(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Site]:
    """A mesh with an encoder, two prefills, and two decodes that propose tokens."""
    shown: list[list[int]] = request.getfixturevalue("shown")
    base = images.spec(request.getfixturevalue("model"), 2)
    proposed = json.dumps({"method": "prompt_lookup", "k": 3, "schedule": "fixed"})
    env = {**base.env, **PATIENCE, "PDMESH_SPECULATION": proposed}
    spec = replace(base, num_prefill=2, num_encoder=1, env=env)
    asked = [images.body(*chat, len(a)) for chat, a in zip(images.CHATS, shown, strict=True)]
    async with started(spec, folder) as (mesh, client):
        await until_encoding(mesh)
        yield Site(mesh, client, "/v1/chat/completions", asked, shown)


@asynccontextmanager
async def steps_ahead(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Site]:
    """A mesh with two prefills and two decodes that schedule steps ahead."""
    told: dict[tuple[int, ...], list[int]] = request.getfixturevalue("told")
    spec = texts.spec(request.getfixturevalue("text_model"), 2, 2, ASYNC_SCHEDULING="on")
    more = {"model": "default", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answers = [told[prompt] for prompt in texts.STREAMS]
    asked = [
        {"prompt": list(prompt), "max_tokens": len(answer), **more}
        for prompt, answer in zip(texts.STREAMS, answers, strict=True)
    ]
    async with started(spec, folder) as (mesh, client):
        yield Site(mesh, client, "/v1/completions", asked, answers)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[pictures, steps_ahead])
async def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Site]:
    """One mesh at a time.

    All its cases share it, so each case also finds what earlier faults left.
    """
    async with request.param(request, tmp_path_factory.mktemp("mesh")) as running:
        yield running


with_pictures = pytest.mark.parametrize("site", [pictures], indirect=True)


@with_pictures
async def test_proposals_and_images_are_used(site: Site) -> None:
    """Otherwise, the tests below would show nothing about these features."""
    await site.asking(NUM_ROUNDS)
    assert site.counted(DECODES, "pdmesh_speculation_proposals_total") > 0
    metric = "pdmesh_images_awaited_total"
    assert site.counted(PREFILLS, metric, pdmesh_outcome="fetched") > 0


@pytest.mark.parametrize("site", [steps_ahead], indirect=True)
async def test_steps_are_scheduled_ahead(site: Site) -> None:
    await site.asking(NUM_ROUNDS)
    assert site.counted(DECODES, "pdmesh_engine_steps_overlapped_total") > 0


async def survives_a_signal(site: Site, fault: Fault) -> None:
    await site.mesh.wait_ready(timeout_s=RESTART_S)
    pid = site.mesh.pid(fault.victim)
    asking = site.asking(NUM_ROUNDS)

    async def is_busy() -> bool:
        return bool(await fleet.held(site.mesh))

    await until(is_busy)
    await hit(site.mesh, fault, pid)
    await asyncio.wait_for(asking, RESTART_S)
    await site.is_whole_again()


async def survives_a_failpoint(site: Site, victim: str, failpoint: str, pid: int) -> None:
    for number in itertools.count():
        await site.asking(NUM_ROUNDS)
        if site.mesh.supervisor.pid(victim) != pid:
            break
        assert number < MAX_ROUNDS, f"{failpoint} was not hit"
    await site.is_whole_again()


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        pytest.param("prefill-0", signal.SIGSTOP, marks=pytest.mark.fault("F4")),
        pytest.param("prefill-0", signal.SIGTERM, marks=pytest.mark.fault("F5")),
        pytest.param("decode-0", signal.SIGKILL, marks=pytest.mark.fault("F7")),
        pytest.param("decode-0", signal.SIGSTOP, marks=pytest.mark.fault("F8")),
    ],
)
async def test_answers_survive_a_process_that_is_hit(
    site: Site, victim: str, number: signal.Signals
) -> None:
    await survives_a_signal(site, Fault(victim, number, 0.0))


@pytest.mark.parametrize(
    ("victim", "failpoint"),
    [
        pytest.param("prefill-0", "prefill.accepted=sigkill@1", marks=pytest.mark.fault("F1")),
        pytest.param("prefill-0", "prefill.staged=sigkill@1", marks=pytest.mark.fault("F2")),
        pytest.param("prefill-0", "prefill.acked=sigkill@1", marks=pytest.mark.fault("F3")),
        pytest.param("decode-0", "decode.range=sigkill@1", marks=pytest.mark.fault("F6")),
        pytest.param("decode-0", "decode.token=sigkill@9", marks=pytest.mark.fault("F7")),
    ],
)
async def test_answers_survive_a_death_at_any_stage(
    site: Site, victim: str, failpoint: str
) -> None:
    pid = await fleet.arm(site.mesh, victim, failpoint)
    await survives_a_failpoint(site, victim, failpoint, pid)


@with_pictures
@pytest.mark.fault("F1", "F4")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_answers_about_images_survive_an_encoder_that_is_hit(
    site: Site, number: signal.Signals
) -> None:
    await survives_a_signal(site, Fault("encoder-0", number, 0.0))


@with_pictures
@pytest.mark.fault("F1")
async def test_answers_about_images_survive_an_encoder_that_dies_at_work(site: Site) -> None:
    mesh, failpoint = site.mesh, "encode.computing=sigkill@1"
    pid = await fleet.arm(mesh, "encoder-0", failpoint)
    # a prefill that has seen an image does not ask the encoder for it again
    for prefill in PREFILLS:
        await mesh.restart(prefill, RESTART_S)
    await until_encoding(mesh)
    await survives_a_failpoint(site, "encoder-0", failpoint, pid)


@pytest.mark.fault("F34")
async def test_corrupt_kv_changes_no_answer(site: Site) -> None:
    def num_corrupt() -> float:
        metric = "pdmesh_kv_transfer_failures_total"
        return site.counted(DECODES, metric, pdmesh_reason="KV_CORRUPT")

    before = num_corrupt()
    await fleet.arm(site.mesh, "prefill-0", "prefill.sending=corrupt", stays=True)
    for number in itertools.count():
        await site.asking(1)
        if num_corrupt() > before:
            break
        assert number < MAX_ROUNDS, "no KV was corrupt"
    await fleet.arm(site.mesh, "prefill-0", "")
    await site.is_whole_again()


@pytest.mark.fault("F27")
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
async def test_clients_that_leave_leave_nothing(site: Site, num_tokens: int) -> None:
    """Clients leave while the prompt is computed, with the first token, or later. Others stay."""
    await site.mesh.wait_ready(timeout_s=RESTART_S)
    long = [number for number, answer in enumerate(site.answers) if len(answer) > num_tokens + 3]
    assert long

    async def leave(number: int) -> None:
        body = site.body(number) | {"stream": True}
        num_read = 0
        async with site.client.stream("POST", site.path, json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    choices = json.loads(line[6:])["choices"]
                    num_read += sum(len(each.get("token_ids") or []) for each in choices)
                if num_read >= num_tokens:
                    return
        raise AssertionError("the answer ended first")

    stayed = site.asking(1)
    await asyncio.gather(*(leave(number) for number in long for _ in range(NUM_ROUNDS)))
    await stayed
    await site.is_whole_again()
