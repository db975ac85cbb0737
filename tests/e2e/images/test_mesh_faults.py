"""Faults of a vLLM mesh on which everything that vLLM can add is on: images that an encoder
encodes, speculation at prefills and decodes, and steps scheduled ahead.

Every answer must be plain vLLM's. Bounds of time are judged on sim (tests/chaos).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import pytest_asyncio

from pdmesh.launcher.mesh import Mesh
from tests.chaos.test_kill_matrix import Case as Fault
from tests.chaos.test_kill_matrix import hit
from tests.e2e.images.test_mesh import CHATS, DECODES, body, expected, model, spec
from tests.e2e.mesh.test_structured_output import PATIENCE, RESTART_S
from tests.support.images.encoders import until_encoding
from tests.support.sites import fleet
from tests.support.waiting import until

__all__ = ["expected", "model"]  # fixtures

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("default"),  # vLLM's own
    pytest.mark.asyncio(loop_scope="session"),
]
PREFILLS: Final = ("prefill-0", "prefill-1")
NUM_ROUNDS: Final = 3  # of all chats at once
MAX_ROUNDS: Final = 8  # until a failpoint is hit: not each request goes to the process that has it
SIGNALS: Final = [
    pytest.param(Fault(victim, number, 0.0), id=f"{victim}-{number.name}", marks=marks)
    for victim, number, marks in (
        ("encoder-0", signal.SIGKILL, pytest.mark.fault("F1")),
        ("encoder-0", signal.SIGSTOP, pytest.mark.fault("F4")),
        ("prefill-0", signal.SIGSTOP, pytest.mark.fault("F4")),
        ("prefill-0", signal.SIGTERM, pytest.mark.fault("F5")),
        ("decode-0", signal.SIGKILL, pytest.mark.fault("F7")),
        ("decode-0", signal.SIGSTOP, pytest.mark.fault("F8")),
    )
]
FAILPOINTS: Final = [
    pytest.param("encoder-0", "encode.computing=sigkill@1", marks=pytest.mark.fault("F1")),
    pytest.param("prefill-0", "prefill.accepted=sigkill@1", marks=pytest.mark.fault("F1")),
    pytest.param("prefill-0", "prefill.staged=sigkill@1", marks=pytest.mark.fault("F2")),
    pytest.param("prefill-0", "prefill.acked=sigkill@1", marks=pytest.mark.fault("F3")),
    pytest.param("decode-0", "decode.range=sigkill@1", marks=pytest.mark.fault("F6")),
    pytest.param("decode-0", "decode.token=sigkill@9", marks=pytest.mark.fault("F7")),
]
_SALTS: Final = itertools.count()


@dataclass(frozen=True)
class Site:
    mesh: Mesh
    client: httpx.AsyncClient
    answers: list[list[int]]

    def sent(self, number: int, **more: object) -> dict[str, Any]:
        """With a salt of its own, so that no prompt finds its KV."""
        salt = {"cache_salt": str(next(_SALTS))}
        return body(*CHATS[number], len(self.answers[number])) | salt | more

    async def ask(self, number: int) -> None:
        path = "/v1/chat/completions"
        response = await self.client.post(path, json=self.sent(number))
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["token_ids"] == self.answers[number]

    def asking(self, num_rounds: int) -> asyncio.Future[list[None]]:
        return asyncio.gather(*(self.ask(n) for n in range(len(CHATS)) for _ in range(num_rounds)))

    async def is_whole_again(self) -> None:
        await self.mesh.wait_ready(timeout_s=RESTART_S)
        await self.asking(1)
        await fleet.until_nothing_held(self.mesh, within_s=120)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def site(
    model: Path,
    expected: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Site]:
    """All faults share one mesh, so each finds what those before left behind."""
    base = spec(model, 2)
    added = {
        "PDMESH_ASYNC_SCHEDULING": "on",
        "PDMESH_SPECULATION": json.dumps({"method": "prompt_lookup", "k": 3, "schedule": "fixed"}),
    }
    wanted = replace(base, num_prefill=2, num_encoder=1, env={**base.env, **PATIENCE, **added})
    async with (
        Mesh(wanted, tmp_path_factory.mktemp("faults")) as mesh,
        httpx.AsyncClient(base_url=mesh.http_url, timeout=600) as client,
    ):
        await until_encoding(mesh)
        yield Site(mesh, client, expected)


async def test_what_vllm_adds_is_on(site: Site) -> None:
    """Otherwise, the tests below show nothing about it."""
    await site.asking(NUM_ROUNDS)
    assert fleet.counted(site.mesh, DECODES, "pdmesh_speculation_proposals_total") > 0
    assert fleet.counted(site.mesh, DECODES, "pdmesh_engine_steps_overlapped_total") > 0
    metric = "pdmesh_images_awaited_total"
    assert fleet.counted(site.mesh, PREFILLS, metric, pdmesh_outcome="fetched") > 0


@pytest.mark.parametrize("fault", SIGNALS)
async def test_answers_survive_a_process_that_is_hit(site: Site, fault: Fault) -> None:
    await site.mesh.wait_ready(timeout_s=RESTART_S)
    pid = site.mesh.pid(fault.victim)
    asking = site.asking(NUM_ROUNDS)

    async def is_busy() -> bool:
        return bool(await fleet.held(site.mesh))

    await until(is_busy)
    await hit(site.mesh, fault, pid)
    await asyncio.wait_for(asking, RESTART_S)
    await site.is_whole_again()


@pytest.mark.parametrize(("victim", "failpoint"), FAILPOINTS)
async def test_answers_survive_a_death_at_any_stage(
    site: Site, victim: str, failpoint: str
) -> None:
    pid = await fleet.arm(site.mesh, victim, failpoint)
    if victim == "encoder-0":  # a prefill that has seen an image does not ask for it again
        for prefill in PREFILLS:
            await site.mesh.restart(prefill, RESTART_S)
        await until_encoding(site.mesh)
    for number in itertools.count():
        await site.asking(NUM_ROUNDS)
        if site.mesh.supervisor.pid(victim) != pid:
            break
        assert number < MAX_ROUNDS, "the failpoint was not hit"
    await site.is_whole_again()


@pytest.mark.fault("F34")
async def test_corrupt_kv_changes_no_answer(site: Site) -> None:
    def num_corrupt() -> float:
        metric = "pdmesh_kv_transfer_failures_total"
        return fleet.counted(site.mesh, DECODES, metric, pdmesh_reason="corrupt")

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
    """They leave while the prompt is computed, with the first token, and later, beside others."""
    await site.mesh.wait_ready(timeout_s=RESTART_S)
    long = [number for number, answer in enumerate(site.answers) if len(answer) > num_tokens + 3]
    assert long

    async def leave(number: int) -> None:
        got = 0
        sent = site.sent(number, stream=True)
        async with site.client.stream("POST", "/v1/chat/completions", json=sent) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line[6:])["choices"]:
                    got += len(choice.get("token_ids") or [])
                if got >= num_tokens:
                    return
        raise AssertionError("the answer ended first")

    stayed = site.asking(1)
    await asyncio.gather(*(leave(number) for number in long for _ in range(NUM_ROUNDS)))
    await stayed
    await site.is_whole_again()
