"""Pooling instances on vLLM give the vectors and scores of plain vLLM, also after a death.

Pooling instances make vectors or scores of whole texts. Plain vLLM is vLLM without the mesh.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pdmesh.events.v1.events_pb2 import RequestFinished
from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from pdmesh.models import smollm2
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import decode_event
from pdmesh.net.nats.bus import NatsBus
from tests.e2e.tiny_bert import write_tiny_bert
from tests.support.waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
]
NEAR = 1e-5
START_S = 400.0
QUERY = "the capital of france?"
# If the request names the side to cut at, vLLM also cuts special tokens. Otherwise, vLLM keeps
# them. The last limit has no room for the special tokens.
CUTS: list[dict[str, Any]] = [
    {"truncate_prompt_tokens": 6},
    {"truncate_prompt_tokens": 6, "truncation_side": "right"},
    {"truncate_prompt_tokens": 6, "truncation_side": "left"},
    {"truncate_prompt_tokens": 1},
]
TEXTS = ["the capital of france is paris.", "a", "berlin is a city", "abc " * 30]


@contextmanager
def plain(model: Path, convert: str, asked: dict[str, Any], folder: Path) -> Iterator[Path]:
    """Start plain vLLM, and yield the path of the file that it will write."""
    texts, numbers = folder / "texts.json", folder / "numbers.json"
    texts.write_text(json.dumps(asked))
    command = [sys.executable, "-m", "tests.e2e.plain_pooling", str(model), convert]
    process = subprocess.Popen([*command, str(texts), str(numbers)])
    try:
        yield numbers
    finally:
        process.kill()
        process.wait()


async def numbers_in(file: Path) -> dict[str, Any]:
    async with asyncio.timeout(START_S):
        while not file.exists():
            await asyncio.sleep(0.2)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def spec(model: Path, num_pooling: int = 1, **env: str) -> MeshSpec:
    return MeshSpec(
        num_prefill=0,
        num_decode=0,
        num_pooling=num_pooling,
        model_dir=model,
        pooling_model_dir=model,
        http_port=0,
        grpc_port=0,
        start_timeout_s=START_S,
        env=env,
    )


def near(got: list[float], wanted: list[float]) -> bool:
    return got == pytest.approx(wanted, abs=NEAR)


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
async def test_vectors_and_their_nearness_are_those_of_plain_vllm(
    tmp_path: Path, kind: str
) -> None:
    """One model is an embedding model. The other model is converted, and would otherwise draw
    answers.
    """
    if kind == "decoder":
        model, convert = smollm2.DEFAULT_DIR.absolute(), "embed"
    else:
        model, convert = write_tiny_bert(tmp_path / "bert", scores_pairs=False), "auto"
    asked = {"embed": TEXTS, "score": [QUERY, TEXTS], "cuts": CUTS}
    with plain(model, convert, asked, tmp_path) as file:
        async with Mesh(spec(model), tmp_path / "mesh") as mesh:
            async with openai.AsyncOpenAI(base_url=f"{mesh.http_url}/v1", api_key="none") as client:
                answer = await client.embeddings.create(model=model.name, input=TEXTS)
            async with httpx.AsyncClient(base_url=mesh.http_url, timeout=120) as http:
                body = {"model": model.name, "text_1": QUERY, "text_2": TEXTS}
                scored = (await http.post("/score", json=body)).json()
                long = await http.post(
                    "/v1/embeddings", json={"model": model.name, "input": "a b " * 5000}
                )
                bodies = [{"model": model.name, "input": TEXTS, **cut} for cut in CUTS]
                cuts = [(await http.post("/v1/embeddings", json=body)).json() for body in bodies]
            wanted = await numbers_in(file)
    for got, vector in zip(answer.data, wanted["embed"], strict=True):
        assert near(got.embedding, vector)
    for number, cut in enumerate(cuts):
        for each, vector in zip(cut["data"], wanted[f"cut {number}"], strict=True):
            assert near(each["embedding"], vector), CUTS[number]
    assert near([each["score"] for each in scored["data"]], wanted["score"])
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_cross_encoder_ranks_as_plain_vllm_scores(tmp_path: Path) -> None:
    model = write_tiny_bert(tmp_path / "ranker", scores_pairs=True)
    asked = {"score": [QUERY, TEXTS], "cuts": CUTS}
    with plain(model, "auto", asked, tmp_path) as file:
        async with (
            Mesh(spec(model), tmp_path / "mesh") as mesh,
            httpx.AsyncClient(base_url=mesh.http_url, timeout=120) as http,
        ):
            body = {"model": "ranker", "query": QUERY, "documents": TEXTS}
            ranked = (await http.post("/rerank", json=body)).json()["results"]
            refused = await http.post("/v1/embeddings", json={"model": "ranker", "input": "a"})
            pairs = {"model": "ranker", "text_1": QUERY, "text_2": TEXTS}
            cuts = [(await http.post("/score", json=pairs | cut)).json() for cut in CUTS]
            numbers = await numbers_in(file)
    wanted = numbers["score"]
    for number, cut in enumerate(cuts):
        scores = [each["score"] for each in cut["data"]]
        assert near(scores, numbers[f"cut {number}"]), CUTS[number]
    got = sorted(ranked, key=lambda each: int(each["index"]))
    assert near([each["relevance_score"] for each in got], wanted)
    assert [each["index"] for each in ranked] == sorted(range(4), key=lambda i: -wanted[i])
    assert refused.json()["error"]["code"] == "wrong_task"


async def test_no_answer_is_lost_when_a_vllm_instance_is_killed(tmp_path: Path) -> None:
    model = write_tiny_bert(tmp_path / "vectors", scores_pairs=False)
    async with (
        Mesh(spec(model, num_pooling=2), tmp_path / "mesh") as mesh,
        openai.AsyncOpenAI(
            base_url=f"{mesh.http_url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client,
    ):

        async def one(call: int) -> list[list[float]]:
            texts = [f"{text} {call}" for text in TEXTS * 8]
            answer = await client.embeddings.create(model="vectors", input=texts)
            return [each.embedding for each in answer.data]

        bus = await NatsBus.connect(mesh.nats_url, "pooling-test")
        events: list[RequestFinished] = []

        async def hear(message: Message) -> None:
            events.append(decode_event(message, RequestFinished))

        await bus.subscribe(subjects.request_finished(), hear)
        before = [await one(call) for call in range(4)]
        is_over = asyncio.Event()

        async def keep_asking(call: int) -> None:
            while not is_over.is_set():
                for vector, wanted in zip(await one(call), before[call], strict=True):
                    assert near(vector, wanted)

        clients = [asyncio.create_task(keep_asking(number % 4)) for number in range(12)]
        await until(lambda: len(events) > 24)
        mesh.kill("pooling-0")
        try:
            await until(lambda: any(event.num_migrations for event in events))
        finally:
            is_over.set()
            await asyncio.gather(*clients)
        assert {event.outcome for event in events} == {"completed"}
        await bus.close()
