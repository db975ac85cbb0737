"""Answers of a vLLM mesh match their JSON schemas, although a prefill and a decode are killed.

tests/chaos/test_structured_output.py does the same with many more requests on the simulated engine.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx
import jsonschema
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from pdmesh.launcher.mesh import Mesh
from tests.e2e.cases import VOCABULARY
from tests.e2e.mesh.test_equality import mesh_spec
from tests.support.schemas import SCHEMAS
from tests.support.sites import fleet
from tests.support.streams import StreamOutcome, stream_completion
from tests.support.waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="session"),
]
NUM_REQUESTS: Final = 60
NUM_AT_ONCE: Final = 6
MAX_TOKENS: Final = 64
RESTART_S: Final = 300.0
# A restart uses both cores for a long time. In this time, a slow instance must not be judged dead,
# and a request must wait until the only prefill is back.
PATIENCE: Final = {
    "PDMESH_ENGINE_HUNG_S": "300",
    "PDMESH_GATEWAY_TTFT_S": "300",
    "PDMESH_GATEWAY_ANSWER_S": "60",
    "PDMESH_GATEWAY_STALL_S": "120",
    "PDMESH_TRANSFER_TIMEOUT_S": "60",
    "PDMESH_TICKET_LEASE_S": "60",
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits()) as running:
        yield running


def asked(number: int) -> tuple[list[int], dict[str, Any]]:
    """The prompt of a request, and its other fields."""
    rng = random.Random(number)
    prompt = rng.choices(VOCABULARY, k=rng.randrange(8, 80))
    schema = SCHEMAS[number % len(SCHEMAS)]
    form = {"json": schema, "disable_any_whitespace": True}
    drawn = {"temperature": 0.7, "seed": number, "return_token_ids": True}
    return prompt, drawn | {"structured_outputs": form}


async def ask(mesh: Mesh, client: httpx.AsyncClient, number: int) -> StreamOutcome:
    prompt, more = asked(number)
    return await stream_completion(client, mesh.http_url, prompt, MAX_TOKENS, **more)


def num_admitted(mesh: Mesh, name: str) -> float:
    found = fleet.samples(mesh, name)
    return sum(value for metric, _, value in found if metric == "pdmesh_admissions_total")


async def ask_and_kill(
    mesh: Mesh, client: httpx.AsyncClient, numbers: range, name: str
) -> list[StreamOutcome]:
    """Send requests and kill `name` while it serves some of them. Return when `name` is back and
    all requests have ended.
    """
    turn = asyncio.Semaphore(NUM_AT_ONCE)

    async def in_turn(number: int) -> StreamOutcome:
        async with turn:
            return await ask(mesh, client, number)

    enough = num_admitted(mesh, name) + 3
    asking = asyncio.gather(*map(in_turn, numbers))
    await until(lambda: num_admitted(mesh, name) >= enough, within_s=120)
    pid = mesh.pid(name)
    mesh.kill(name)
    await until(lambda: mesh.supervisor.pid(name) not in (None, pid), within_s=60)
    await mesh.wait_ready([name], RESTART_S)
    return await asking


@pytest.mark.req("S37", "S43")
@pytest.mark.fault("F1", "F7")
async def test_every_answer_that_ends_is_valid_whichever_vllm_instance_dies(
    model_dir: Path, tmp_path: Path, client: httpx.AsyncClient
) -> None:
    spec = mesh_spec(model_dir, 1, 0)
    spec = replace(spec, num_decode=2, env={**spec.env, **PATIENCE})
    async with Mesh(spec, tmp_path) as mesh:
        outcomes: list[StreamOutcome] = []
        for name in ("decode-0", "prefill-0"):
            numbers = range(len(outcomes), len(outcomes) + NUM_REQUESTS // 2)
            outcomes += await ask_and_kill(mesh, client, numbers, name)
        check(outcomes, Tokenizer.from_file(str(model_dir / "tokenizer.json")))
        for number in range(0, NUM_REQUESTS, 10):
            await compare_with_whole(client, mesh, number, outcomes[number])


def check(outcomes: list[StreamOutcome], tokenizer: Tokenizer) -> None:
    """Check that an answer's pieces are the text of its tokens, and that the answer fits its
    schema.
    """
    num_valid = 0
    for number, outcome in enumerate(outcomes):
        assert outcome.fault_in_ending() == ""
        if not outcome.is_complete:
            continue  # the stream ended with an error or was cut; few may
        text = tokenizer.decode(outcome.token_ids, skip_special_tokens=True)
        assert outcome.text == text.rstrip("\ufffd"), number
        if outcome.finish_reason == "stop":
            jsonschema.validate(json.loads(outcome.text), SCHEMAS[number % len(SCHEMAS)])
            num_valid += 1
    num_complete = sum(outcome.is_complete for outcome in outcomes)
    assert num_complete > 0.9 * len(outcomes)
    assert num_valid > 0.25 * len(outcomes), "the others are longer than MAX_TOKENS"


async def compare_with_whole(
    client: httpx.AsyncClient, mesh: Mesh, number: int, outcome: StreamOutcome
) -> None:
    """Check that the mesh gives the same answer without a stream, when no instance is killed."""
    if not outcome.is_complete:
        return
    prompt, more = asked(number)
    body = {"model": "default", "prompt": prompt, "max_tokens": MAX_TOKENS, **more}
    answer = (await client.post(f"{mesh.http_url}/v1/completions", json=body)).json()
    (choice,) = answer["choices"]
    told = (choice["text"], choice["finish_reason"], choice["token_ids"])
    assert told == (outcome.text, outcome.finish_reason, outcome.token_ids), number
