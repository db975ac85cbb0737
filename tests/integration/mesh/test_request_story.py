"""Tests that `pdmesh trace` reports what happened to requests whose decode was killed."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from pdmesh.launcher.mesh import Mesh
from tests.support.sites import fleet
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

DECODES = ("decode-0", "decode-1")
NUM_TOKENS = 200


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    async with Mesh(fleet.two_by_two(), tmp_path_factory.mktemp("mesh")) as running:
        yield running


async def trace(mesh: Mesh, *words: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "pdmesh.cli.app", "trace", *words]
    process = await asyncio.create_subprocess_exec(
        *command, "--state-dir", str(mesh.state_dir),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def with_requests(mesh: Mesh) -> list[str]:
    """The decodes that have taken a request."""

    def num_admitted(name: str) -> float:
        found = fleet.samples(mesh, name)
        return sum(value for metric, _, value in found if metric == "pdmesh_admissions_total")

    return [name for name in DECODES if num_admitted(name)]


async def streamed(client: openai.AsyncOpenAI, content: str, begun: asyncio.Event) -> str:
    """Read a whole streamed answer, set `begun` at its first chunk, and return its id."""
    stream = await client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": content}],
        max_tokens=NUM_TOKENS,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    found = ""
    async for chunk in stream:
        found = chunk.id
        begun.set()
    return found


async def test_the_story_names_the_death_of_a_decode_and_how_it_went_on(mesh: Mesh) -> None:
    url = f"{mesh.http_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        begun = [asyncio.Event() for _ in range(6)]
        tasks = [
            asyncio.create_task(streamed(client, f"question {number}", event))
            for number, event in enumerate(begun)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        await until(lambda: with_requests(mesh))
        victim = with_requests(mesh)[0]
        mesh.kill(victim)
        ids = await asyncio.gather(*tasks)
    stories: list[list[dict[str, Any]]] = []
    for found in ids:
        code, out, err = await trace(mesh, found, "-o", "json")
        assert (code, err) == (0, "")
        stories.append(json.loads(out))
    for steps in stories:
        assert [step["at"] for step in steps] == sorted(step["at"] for step in steps)
        told = [step["what"] for step in steps]
        assert told[0].startswith("accepted: chat of ")
        assert any(f"completed: {NUM_TOKENS} tokens" in what for what in told)
    lost = [
        [step["what"] for step in steps]
        for steps in stories
        if any(f"lost {victim} after" in step["what"] for step in steps)
    ]
    assert lost, "some of them were at the decode that died"
    (other,) = {*DECODES} - {victim}
    for told in lost:
        place = next(n for n, what in enumerate(told) if f"lost {victim} after" in what)
        assert any("completed" in what and other in what for what in told[place:])
    code, text, _ = await trace(mesh, ids[0])
    assert code == 0
    assert text.splitlines()[0].split() == ["time", "since", "told", "by", "what"]


async def test_a_request_that_no_log_names_is_an_error(mesh: Mesh) -> None:
    code, out, err = await trace(mesh, "chatcmpl-000000000000000000000000")
    assert (code, out) == (1, "")
    assert "names request chatcmpl-000000000000000000000000" in err
