"""Tests /v1/embeddings with the official client. Tests the vectors, the refusals, and that no
instance keeps a call after its end.
"""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from pdmesh.core.kv.prefix.block_hash import token_array
from pdmesh.engine.sim.pooling import normalised, vector
from tests.fakes.gateway_mesh import GatewayMesh
from tests.fakes.pooling_instances import SEED, PoolingSite
from tests.support.waiting import until

NUM_DIMENSIONS = 16


def expected(tokens: Any, num_dimensions: int = NUM_DIMENSIONS) -> Any:
    made = vector(token_array(tokens), NUM_DIMENSIONS, SEED)[:num_dimensions]
    return normalised(made).astype("<f4").tolist()


def tokens_of(mesh: GatewayMesh, text: str) -> list[int]:
    return list(mesh.tokenizer._encode(text, add_special_tokens=True))


async def test_the_official_client_gets_the_vectors_of_its_texts_in_order(
    mesh: GatewayMesh, sites: list[PoolingSite]
) -> None:
    """By default the client asks for base64. Both formats must give the same vectors."""
    texts = ["hello world", "bye", "hello world"]
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as own:
        packed = await own.embeddings.create(model="vectors", input=texts)
        plain = await own.embeddings.create(model="vectors", input=texts, encoding_format="float")
    want = [expected(tokens_of(mesh, text)) for text in texts]
    assert [each.embedding for each in packed.data] == want
    assert [each.embedding for each in plain.data] == want
    assert [each.index for each in plain.data] == [0, 1, 2]
    assert plain.usage.prompt_tokens == sum(len(tokens_of(mesh, text)) for text in texts)
    assert plain.usage.total_tokens == plain.usage.prompt_tokens
    for site in sites:
        await site.until_idle()


@pytest.mark.parametrize(
    ("given", "tokens"),
    [("abc", None), ([1, 2, 3], [[1, 2, 3]]), ([[1, 2], [3]], [[1, 2], [3]])],
    ids=["text", "ids", "lists-of-ids"],
)
async def test_each_form_of_input_is_accepted(
    mesh: GatewayMesh, http: httpx.AsyncClient, given: Any, tokens: Any
) -> None:
    answer = await http.post("/v1/embeddings", json={"model": "vectors", "input": given})
    assert answer.status_code == 200, answer.text
    wanted = [tokens_of(mesh, given)] if tokens is None else tokens
    assert [each["embedding"] for each in answer.json()["data"]] == [expected(t) for t in wanted]


async def test_more_inputs_than_a_batch_come_back_in_order_over_all_instances(
    mesh: GatewayMesh, http: httpx.AsyncClient, sites: list[PoolingSite]
) -> None:
    inputs = [[1 + i % 90, 1 + (i * 7) % 90] for i in range(1000)]
    answer = await http.post("/v1/embeddings", json={"model": "vectors", "input": inputs})
    assert [each["embedding"] for each in answer.json()["data"]] == [expected(i) for i in inputs]
    assert all(site.host.vitals.num_accepted > 0 for site in sites)
    for site in sites:
        await site.until_idle()


async def test_base64_is_little_endian_float32(http: httpx.AsyncClient) -> None:
    body = {"model": "vectors", "input": [4, 5, 6], "encoding_format": "base64"}
    answer = await http.post("/v1/embeddings", json=body)
    data = base64.b64decode(answer.json()["data"][0]["embedding"])
    assert np.frombuffer(data, dtype="<f4").tolist() == expected([4, 5, 6])


async def test_a_matryoshka_model_gives_fewer_dimensions_on_request(
    http: httpx.AsyncClient,
) -> None:
    body = {"model": "vectors", "input": [4, 5, 6], "dimensions": 4}
    answer = await http.post("/v1/embeddings", json=body)
    assert answer.json()["data"][0]["embedding"] == expected([4, 5, 6], 4)


@pytest.mark.parametrize(("side", "kept"), [(None, [1, 2]), ("right", [1, 2]), ("left", [3, 4])])
async def test_an_input_is_truncated_as_requested(
    http: httpx.AsyncClient, side: str | None, kept: list[int]
) -> None:
    body = {"model": "vectors", "input": [1, 2, 3, 4], "truncate_prompt_tokens": 2}
    answer = await http.post("/v1/embeddings", json=body | {"truncation_side": side})
    assert answer.json()["data"][0]["embedding"] == expected(kept)
    assert answer.json()["usage"]["prompt_tokens"] == 2


async def test_a_text_longer_than_the_context_is_truncated_on_request(
    http: httpx.AsyncClient,
) -> None:
    body = {"model": "vectors", "input": "a b c " * 2000}
    refused = await http.post("/v1/embeddings", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    answer = await http.post("/v1/embeddings", json=body | {"truncate_prompt_tokens": -1})
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == 512


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"input": []}, 400, "input"),
    ({"input": ""}, 400, "input"),
    ({"input": ["a", ""]}, 400, "input[1]"),
    ({"input": ["a", [1]]}, 400, "input"),
    ({"input": [1, "a"]}, 400, "input"),
    ({"input": [[1], []]}, 400, "input"),
    ({"input": [-1]}, 400, "input"),
    ({"input": [1 << 40]}, 400, "input"),
    ({"input": [1.5]}, 400, "input"),
    ({"input": [[1]] * 2049}, 400, "input"),
    ({"input": [1] * 513}, 400, "input"),
    ({"input": "a", "dimensions": 0}, 400, "dimensions"),
    ({"input": "a", "dimensions": 17}, 400, "dimensions"),
    ({"input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
    ({"input": "a", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": 513}, 400, "truncate_prompt_tokens"),
    ({"input": "a", "messages": [{}]}, 400, "messages"),
    ({"input": "a", "priority": 1}, 400, "priority"),
    ({"input": "a", "embed_dtype": "float16"}, 400, "embed_dtype"),
    ({"input": "a", "model": "tiny"}, 400, "model"),
    ({"input": "a", "model": "unknown"}, 404, "model"),
    ({"input": "a", "scenario": "elsewhere"}, 200, ""),
]


@pytest.mark.parametrize(("body", "status", "field"), REFUSED, ids=lambda value: str(value)[:40])
async def test_what_is_wrong_is_named(
    http: httpx.AsyncClient, body: dict[str, Any], status: int, field: str
) -> None:
    answer = await http.post("/v1/embeddings", json={"model": "vectors", **body})
    assert answer.status_code == status, answer.text[:500]
    if status != 200:
        assert answer.json()["error"]["param"] == field
    assert len(answer.content) < 4096


async def test_a_pooling_model_is_listed_and_makes_no_answers(http: httpx.AsyncClient) -> None:
    listed = [model["id"] for model in (await http.get("/v1/models")).json()["data"]]
    assert sorted(listed) == ["tiny", "vectors"]
    assert (await http.get("/v1/models/vectors")).json()["max_model_len"] == 512
    answer = await http.post("/v1/completions", json={"model": "vectors", "prompt": "a"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "wrong_task"
    chat = {"model": "default", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    answer = await http.post("/v1/chat/completions", json=chat)
    assert answer.json()["model"] == "tiny"


async def test_tokenize_works_for_a_pooling_model(
    mesh: GatewayMesh, http: httpx.AsyncClient
) -> None:
    answer = await http.post("/tokenize", json={"model": "vectors", "prompt": "abc"})
    assert answer.json()["tokens"] == tokens_of(mesh, "abc")
    assert answer.json()["max_model_len"] == 512


async def test_a_call_is_reported_once(mesh: GatewayMesh, http: httpx.AsyncClient) -> None:
    await http.post("/v1/embeddings", json={"model": "vectors", "input": [[1, 2], [3]]})
    await until(lambda: len(mesh.events) == 1)
    (event,) = mesh.events
    assert (event.operation, event.outcome, event.model) == ("embeddings", "completed", "vectors")
    assert event.usage.num_prompt_tokens == 3
    assert event.pooling_id in ("pooling-0", "pooling-1")
    assert (event.prefill_id, event.ttft_ms) == ("", 0)


async def test_many_concurrent_calls_each_get_their_own_answer(
    mesh: GatewayMesh, http: httpx.AsyncClient, sites: list[PoolingSite]
) -> None:
    """Some calls must wait, because there are more calls than slots."""

    async def one(i: int) -> bool:
        tokens = [1 + i % 90, 1 + i // 90, 3]
        answer = await http.post("/v1/embeddings", json={"model": "vectors", "input": tokens})
        assert answer.status_code == 200, answer.text
        return bool(answer.json()["data"][0]["embedding"] == expected(tokens))

    assert all(await asyncio.gather(*(one(i) for i in range(200))))
    assert mesh.gateway.frontend.num_calls == 0
    for site in sites:
        await site.until_idle()
