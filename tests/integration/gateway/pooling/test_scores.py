"""Tests /score and /rerank on each of their paths, with a model that makes vectors and with a
cross-encoder.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdmesh.core.kv.prefix.block_hash import token_array
from pdmesh.engine.sim.pooling import vector
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.fakes.pooling_instances import SEED, pooling_instance

QUERY = "what is the capital of france"
DOCUMENTS = ["bread", "the capital of france is paris", "berlin is a city"]


def near(mesh: GatewayMesh, one: str, other: str) -> float:
    first, second = (
        vector(token_array(mesh.tokenizer._encode(text, add_special_tokens=True)), 16, SEED)
        for text in (one, other)
    )
    return float(first @ second)


@pytest.fixture
async def cross(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway with a cross-encoder."""
    async with (
        pooling_instance("pooling-0", "ranker", scores_pairs=True) as site,
        gateway_mesh(tmp_path, 0, 0) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=60) as client,
    ):
        mesh.register(site.record)
        yield client


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    "names",
    [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")],
)
async def test_a_score_is_the_cosine_of_the_vectors(
    mesh: GatewayMesh, http: httpx.AsyncClient, path: str, names: tuple[str, str]
) -> None:
    body = {"model": "vectors", names[0]: QUERY, names[1]: DOCUMENTS}
    answer = (await http.post(path, json=body)).json()
    wanted = [near(mesh, QUERY, document) for document in DOCUMENTS]
    assert [each["score"] for each in answer["data"]] == pytest.approx(wanted, abs=1e-5)
    assert [(each["index"], each["object"]) for each in answer["data"]] == [
        (i, "score") for i in range(3)
    ]
    num = sum(
        len(mesh.tokenizer._encode(text, add_special_tokens=True)) for text in (QUERY, *DOCUMENTS)
    )
    assert answer["usage"] == {"prompt_tokens": num, "total_tokens": num}


async def test_two_lists_of_equal_length_are_scored_in_pairs(
    mesh: GatewayMesh, http: httpx.AsyncClient
) -> None:
    body = {"model": "vectors", "text_1": DOCUMENTS, "text_2": DOCUMENTS[::-1]}
    answer = (await http.post("/score", json=body)).json()
    wanted = [near(mesh, *pair) for pair in zip(DOCUMENTS, DOCUMENTS[::-1], strict=True)]
    assert [each["score"] for each in answer["data"]] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_the_nearest_document_comes_first(
    mesh: GatewayMesh, http: httpx.AsyncClient, path: str
) -> None:
    body = {"model": "vectors", "query": QUERY, "documents": DOCUMENTS, "top_n": 2}
    answer = (await http.post(path, json=body)).json()
    wanted = sorted(((near(mesh, QUERY, d), d) for d in DOCUMENTS), reverse=True)[:2]
    got = [(each["relevance_score"], each["document"]["text"]) for each in answer["results"]]
    assert [text for _, text in got] == [text for _, text in wanted]
    assert [s for s, _ in got] == pytest.approx([s for s, _ in wanted], abs=1e-5)
    assert [DOCUMENTS[each["index"]] for each in answer["results"]] == [t for _, t in wanted]


async def test_documents_may_be_objects_and_may_be_left_out_of_the_answer(
    http: httpx.AsyncClient,
) -> None:
    body = {
        "model": "vectors",
        "query": QUERY,
        "documents": [{"text": d} for d in DOCUMENTS],
        "return_documents": False,
    }
    answer = (await http.post("/rerank", json=body)).json()
    assert len(answer["results"]) == 3
    assert not any("document" in each for each in answer["results"])


async def test_a_cross_encoder_reads_both_texts_of_a_pair(cross: httpx.AsyncClient) -> None:
    body = {"model": "ranker", "text_1": QUERY, "text_2": DOCUMENTS}
    scores = [e["score"] for e in (await cross.post("/score", json=body)).json()["data"]]
    assert all(0 < score < 1 for score in scores)
    raw = (await cross.post("/score", json=body | {"use_activation": False})).json()["data"]
    assert scores == pytest.approx([1 / (1 + math.exp(-e["score"])) for e in raw], abs=1e-5)
    swapped = body | {"text_1": DOCUMENTS, "text_2": [QUERY] * 3}
    assert len((await cross.post("/score", json=swapped)).json()["data"]) == 3
    refused = await cross.post("/v1/embeddings", json={"model": "ranker", "input": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "wrong_task")


async def test_texts_are_cut_where_the_limits_say(cross: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {"model": "ranker", "query": QUERY, "documents": DOCUMENTS}
    whole = (await cross.post("/rerank", json=body)).json()["usage"]["prompt_tokens"]
    limits = {"max_tokens_per_query": 3, "max_tokens_per_doc": 2}
    cut = (await cross.post("/rerank", json=body | limits)).json()["usage"]["prompt_tokens"]
    assert cut == 3 * (3 + 2) < whole
    body["truncate_prompt_tokens"] = 7
    both = (await cross.post("/rerank", json=body)).json()["usage"]["prompt_tokens"]
    assert both == 3 * 7


async def test_a_long_query_is_read_once_and_cut_with_each_document(
    cross: httpx.AsyncClient,
) -> None:
    """The query fills a tenth of the largest body. The gateway has no room for one copy of it per
    document.
    """
    body: dict[str, Any] = {
        "model": "ranker",
        "query": "a b " * 200_000,
        "documents": [f"{i} " * 30 for i in range(200)],
        "truncate_prompt_tokens": 16,
    }
    answer = await cross.post("/rerank", json=body)
    assert answer.status_code == 200, answer.text[:500]
    assert answer.json()["usage"]["prompt_tokens"] == 200 * 16


async def test_pairs_with_too_many_tokens_together_are_refused_before_they_are_built(
    tmp_path: Path,
) -> None:
    async with (
        pooling_instance("pooling-0", "ranker", scores_pairs=True, max_model_len=1 << 16) as site,
        gateway_mesh(tmp_path, 0, 0) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=60) as client,
    ):
        mesh.register(site.record)
        body = {"model": "ranker", "query": "a" * 60_000, "documents": ["b"] * 2000}
        answer = await client.post("/rerank", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "documents"
    assert "tokens together" in error["message"]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/score", {}, "text_1"),
    ("/score", {"text_1": "a"}, "text_1"),
    ("/score", {"text_1": "a", "documents": ["b"]}, "text_1"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
    ("/score", {"text_1": "a", "text_2": []}, "text_2"),
    ("/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
    ("/score", {"text_1": "a", "text_2": ["b"] * 2049}, "text_2"),
    ("/score", {"text_1": "a", "text_2": "b", "instruction": "x"}, "instruction"),
    ("/score", {"text_1": "a", "text_2": "b", "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
    ("/score", {"text_1": "a", "text_2": "b", "max_tokens_per_doc": 512}, "max_tokens_per_doc"),
    ("/rerank", {"query": "", "documents": ["a"]}, "query"),
    ("/rerank", {"query": "a", "documents": []}, "documents"),
    ("/rerank", {"query": "a", "documents": ""}, "documents[0]"),
    ("/rerank", {"query": "a", "documents": 5}, "documents"),
    ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ("/rerank", {"query": "a", "documents": [{"image": "b"}]}, "documents[0].text"),
    ("/rerank", {"query": "a b " * 3000, "documents": ["a"]}, "query"),
]


@pytest.mark.parametrize(("path", "body", "field"), REFUSED, ids=lambda value: str(value)[:48])
async def test_what_is_wrong_is_named(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], field: str
) -> None:
    answer = await http.post(path, json={"model": "vectors", **body})
    assert answer.status_code == 400, answer.text[:500]
    assert answer.json()["error"]["param"] == field
    assert len(answer.content) < 4096
