"""Answers match their JSON schemas while prefills and decodes are killed."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from pdmesh.core.sampling.constraint import Constraint
from pdmesh.engine.base import FinishReason, Sampling
from pdmesh.engine.grammars.asked_grammars import AskedGrammar, GrammarKind, grammar_of
from pdmesh.launcher.mesh import Mesh
from tests.support.schemas import SCHEMAS
from tests.support.sim_reference import sim_reference
from tests.support.sites import fleet
from tests.support.streams import StreamOutcome, stream_completion
from tests.support.waiting import until

NUM_REQUESTS, NUM_AT_ONCE, MAX_TOKENS = 500, 25, 500
MIN_KILLED = 5


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits()) as running:
        yield running


async def kill_at_random(mesh: Mesh, rng: random.Random, killed: list[str]) -> None:
    """Kill a prefill and a decode in turn, until this task is cancelled. Each kill waits until the
    last victim is back.
    """
    while True:
        for role in ("prefill", "decode"):
            killed.append(f"{role}-{rng.randrange(2)}")
            await kill(mesh, killed[-1])


async def kill(mesh: Mesh, name: str) -> None:
    pid = mesh.pid(name)
    mesh.kill(name)
    await until(lambda: mesh.supervisor.pid(name) not in (None, pid), within_s=60)
    await mesh.wait_ready([name], 180)


async def ask(
    client: httpx.AsyncClient, mesh: Mesh, number: int, turn: asyncio.Semaphore
) -> StreamOutcome:
    rng = random.Random(number)
    prompt = [rng.randrange(40, 120) for _ in range(rng.randrange(20, 200))]
    schema = SCHEMAS[number % len(SCHEMAS)]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with turn:
        return await stream_completion(
            client, mesh.http_url, prompt, MAX_TOKENS, response_format=form
        )


@pytest.mark.req("S37", "S43")
@pytest.mark.fault("F1", "F7")
@pytest.mark.timeout(900)
async def test_every_answer_that_ends_is_valid_whichever_instance_dies(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    """Each answer must be the text that one engine draws, and be valid under its schema."""
    reference = fleet.Reference.load(tmp_path / "model")
    async with Mesh(fleet.two_by_two(), tmp_path / "mesh") as mesh:
        killed: list[str] = []
        killing = asyncio.create_task(kill_at_random(mesh, random.Random(3), killed))
        turn = asyncio.Semaphore(NUM_AT_ONCE)
        outcomes: list[StreamOutcome] = []
        while len(outcomes) < NUM_REQUESTS or len(killed) <= MIN_KILLED:
            numbers = range(len(outcomes), len(outcomes) + 100)
            outcomes += await asyncio.gather(*(ask(client, mesh, n, turn) for n in numbers))
        assert not killing.done(), "the killing ends by itself only if an instance stays away"
        killing.cancel()
    num_valid = 0
    for number, outcome in enumerate(outcomes):
        assert outcome.fault_in_ending() == ""
        if not outcome.is_complete:
            continue  # two instances died during this request
        schema = SCHEMAS[number % len(SCHEMAS)]
        assert (outcome.text, outcome.finish_reason) == expected(reference, outcome, schema)
        if outcome.finish_reason == FinishReason.STOP.value:
            jsonschema.validate(json.loads(outcome.text), schema)
            num_valid += 1
    assert num_valid > 0.95 * len(outcomes)


def expected(
    reference: fleet.Reference, outcome: StreamOutcome, schema: dict[str, Any]
) -> tuple[str, str]:
    constraint = Constraint(grammar_of(AskedGrammar(GrammarKind.JSON, json.dumps(schema))))
    sampling = Sampling(MAX_TOKENS, constraint=constraint)
    tokens, reason = sim_reference(outcome.prompt, sampling, reference.params)
    text = str(reference.tokenizer.decode(tokens, skip_special_tokens=True))
    return text.rstrip("\ufffd"), reason.value
