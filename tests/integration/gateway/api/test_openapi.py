"""Tests that `/openapi.json` names every path and that the gateway's answers match it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdmesh.services.gateway.http.routes import plain_path
from pdmesh.v1.common_pb2 import ROLE_DECODE, ROLE_PREFILL
from tests.fakes.fake_instance import FakeInstance
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.fakes.pooling_instances import pooling_instance
from tests.support.api.documented_answers import check_answers, check_events, routes_of
from tests.support.sites import servers

HELLO = [{"role": "user", "content": "hello"}]
# Sample requests by operation. Each sample is the body of a request, or the path of a request
# without a body. Each answer must match the document. The test also sends each body that allows
# `stream` as a streamed request.
SAMPLES: dict[str, list[Any]] = {
    "post_v1_chat_completions": [
        {"model": "tiny", "messages": HELLO, "max_tokens": 3},
        {"model": "tiny", "messages": HELLO, "max_tokens": 3, "n": 2, "return_token_ids": True},
        {"model": "tiny", "messages": HELLO, "max_tokens": 3, "prompt_logprobs": 0},
        {"model": "tiny", "messages": HELLO, "max_tokens": 3, "logprobs": True, "top_logprobs": 2},
    ],
    "post_v1_completions": [
        {"model": "tiny", "prompt": "abc", "max_tokens": 3},
        {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 3, "return_token_ids": True},
        {"model": "tiny", "prompt": [5, 6], "max_tokens": 3, "logprobs": 2},
        {"model": "tiny", "prompt": "abc", "max_tokens": 3, "echo": True},
        {"model": "tiny", "prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 2},
        {"model": "tiny", "prompt": "abc", "max_tokens": 3, "prompt_logprobs": 0, "n": 2},
    ],
    "post_v1_responses": [{"model": "tiny", "input": "x", "max_output_tokens": 3}],
    "post_v1_responses_input_tokens": [{"model": "tiny", "input": "x"}],
    "get_v1_responses_by_response": ["/v1/responses/{kept}"],
    "get_v1_responses_by_response_input_items": ["/v1/responses/{kept}/input_items"],
    "delete_v1_responses_by_response": ["/v1/responses/{kept}"],
    "post_v1_responses_by_response_cancel": ["/v1/responses/{kept}/cancel"],
    "post_v1_messages": [{"model": "tiny", "messages": HELLO, "max_tokens": 3}],
    "post_v1_messages_count_tokens": [{"model": "tiny", "messages": HELLO}],
    "post_tokenize": [{"model": "tiny", "prompt": "abc"}, {"model": "tiny", "messages": HELLO}],
    "post_detokenize": [{"model": "tiny", "tokens": [5, 6]}, {"model": "tiny", "tokens": []}],
    "post_v1_embeddings": [
        {"model": "vectors", "input": ["a", "b"]},
        {"model": "vectors", "input": [5, 6], "encoding_format": "base64", "dimensions": 2},
    ],
    **{
        name: [
            {"model": "vectors", "text_1": "a", "text_2": ["b", "c"]},
            {"model": "vectors", "queries": ["a"], "documents": "b"},
        ]
        for name in ("post_score", "post_v1_score")
    },
    **{
        name: [
            {"model": "vectors", "query": "a", "documents": ["b", {"text": "c"}]},
            {"model": "vectors", "query": "a", "documents": ["b"], "return_documents": False},
        ]
        for name in ("post_rerank", "post_v1_rerank", "post_v2_rerank")
    },
    "get_v1_models": ["/v1/models"],
    "get_v1_models_by_model": ["/v1/models/tiny"],
    "get_health_live": ["/health/live"],
    "get_health_ready": ["/health/ready"],
    "get_openapi_json": ["/openapi.json"],
}


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[GatewayMesh]:
    """A prefill and a decode that return log probabilities, a pooling instance, and a store of
    responses.
    """
    valkey = servers.valkey(tmp_path)
    await valkey.start()
    async with (
        gateway_mesh(tmp_path, 0, 0, redis_url=valkey.url) as mesh,
        pooling_instance("pooling-0") as pooling,
    ):
        mesh.register(pooling.record)
        for role, name in ((ROLE_PREFILL, "prefill-0"), (ROLE_DECODE, "decode-0")):
            await mesh.add(FakeInstance(role, name, supports_logprobs=True))
        yield mesh
    valkey.close()


@pytest.fixture
async def http(mesh: GatewayMesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=60) as http:
        yield http


async def document_of(http: httpx.AsyncClient) -> dict[str, Any]:
    found: dict[str, Any] = (await http.get("/openapi.json")).json()
    return found


async def test_the_document_has_every_path_and_every_field(
    mesh: GatewayMesh, http: httpx.AsyncClient
) -> None:
    found = await document_of(http)
    for route in routes_of(mesh).values():
        described = found["paths"][plain_path(route.path)][route.method.lower()]
        if (takes := route.operation.takes) is not None:
            schema = described["requestBody"]["content"]["application/json"]["schema"]
            properties = found["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
            assert set(properties["properties"]) == set(takes.__struct_encode_fields__)
    assert sum(map(len, found["paths"].values())) == len(routes_of(mesh))


async def test_every_reference_in_the_document_resolves(http: httpx.AsyncClient) -> None:
    text = (await http.get("/openapi.json")).text
    document = json.loads(text)
    for piece in text.split('"$ref":"#/')[1:]:
        at: Any = document
        for name in piece.partition('"')[0].split("/"):
            at = at[name]


async def test_the_links_lead_from_an_answer_to_the_resource_that_it_created(
    http: httpx.AsyncClient,
) -> None:
    document = await document_of(http)
    methods = {
        described["operationId"]: (method, path)
        for path, item in document["paths"].items()
        for method, described in item.items()
    }
    followed: list[str] = []
    for name, (method, path) in methods.items():
        responses = document["paths"][path][method]["responses"]
        links = responses["200"].get("links", {})
        body = SAMPLES[name][0] if method == "post" else None
        for link in links.values():
            value: Any = (await http.request(method, path, json=body)).json()
            ((parameter, expression),) = link["parameters"].items()
            for step in expression.removeprefix("$response.body#/").split("/"):
                value = value[int(step)] if isinstance(value, list) else value[step]
            its_method, its_path = methods[link["operationId"]]
            answer = await http.request(its_method, its_path.replace(f"{{{parameter}}}", value))
            assert answer.status_code == (400 if its_path.endswith("cancel") else 200)
            followed.append(link["operationId"])
    assert sorted(followed) == sorted(name for name in methods if "_by_" in name)


async def test_every_operation_answers_as_documented(
    mesh: GatewayMesh, http: httpx.AsyncClient
) -> None:
    """Each new path and each new kind of answer needs a sample in this file."""
    routes = routes_of(mesh)
    missing = sorted(routes.keys() - SAMPLES.keys())
    assert not missing, f"no sample requests for {missing}"
    for name, route in routes.items():
        for sample in SAMPLES[name]:
            await check_answers(http, route, sample)


async def test_usage_in_a_stream_is_as_documented(
    mesh: GatewayMesh, http: httpx.AsyncClient
) -> None:
    for name, prompt in (
        ("post_v1_chat_completions", {"messages": HELLO}),
        ("post_v1_completions", {"prompt": "abc"}),
    ):
        route = routes_of(mesh)[name]
        for counts_each in (False, True):
            options = {"include_usage": True, "continuous_usage_stats": counts_each}
            body = {"model": "tiny", "max_tokens": 3, "stream": True, "stream_options": options}
            answer = await http.post(route.path, json=body | prompt)
            check_events(answer, route.operation)


# The greatest values of these fields also depend on the model, its context length, and other
# fields.
_OF_THE_MODEL = {
    "max_tokens", "max_completion_tokens", "min_tokens", "truncate_prompt_tokens",
    "thinking_token_budget", "dimensions", "max_tokens_per_query", "max_tokens_per_doc",
}  # fmt: skip


def bounds_of(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The numeric fields of a request that have a maximum, with their schemas."""
    kinds = {"integer", "number"}
    found: dict[str, dict[str, Any]] = {
        name: next((k for k in of.get("anyOf", [of]) if k.get("type") in kinds), {})
        for name, of in schema["properties"].items()
    }
    return {name: kind for name, kind in found.items() if "maximum" in kind}


@pytest.mark.parametrize(
    ("path", "struct", "given", "num"),
    [
        ("/v1/chat/completions", "ChatCompletionRequest", {"messages": HELLO}, 15),
        ("/v1/completions", "CompletionRequest", {"prompt": "abc", "echo": True}, 14),
        ("/v1/embeddings", "EmbeddingsRequest", {"model": "vectors", "input": "abc"}, 2),
        ("/rerank", "RerankRequest", {"model": "vectors", "query": "a", "documents": ["b"]}, 4),
    ],
)
async def test_every_documented_bound_is_the_one_that_is_checked(
    http: httpx.AsyncClient, path: str, struct: str, given: dict[str, Any], num: int
) -> None:
    schemas = (await document_of(http))["components"]["schemas"]
    bounded = bounds_of(schemas[struct])
    assert len(bounded) >= num
    for name, kind in bounded.items():
        is_low = "minimum" in kind
        low = kind["minimum" if is_low else "exclusiveMinimum"]
        high = kind["maximum"]
        wrong = [high + 1, low - 1 if is_low else low]
        right = [low] if is_low else []
        right += [] if name in _OF_THE_MODEL else [high]
        body = {"model": "tiny", **given}
        body |= {} if body["model"] == "vectors" else {"max_tokens": 2}
        body |= {"logprobs": True} if name == "top_logprobs" else {}
        for value in wrong:
            answer = await http.post(path, json=body | {name: value})
            assert answer.status_code == 400, (name, value)
            assert answer.json()["error"]["param"] == name
        for value in right:
            answer = await http.post(path, json=body | {name: value})
            asked_none = name == "truncate_prompt_tokens" and value == 0
            assert answer.status_code == (400 if asked_none else 200), (name, answer.text)


async def test_the_document_needs_no_key_and_shows_which_paths_need_one(
    http: httpx.AsyncClient,
) -> None:
    paths = (await document_of(http))["paths"]
    assert paths["/openapi.json"]["get"]["security"] == []
    assert paths["/v1/models"]["get"]["security"] == [{}, {"key": []}]


async def test_an_unsupported_field_takes_only_values_that_have_no_effect(
    http: httpx.AsyncClient,
) -> None:
    schemas = (await document_of(http))["components"]["schemas"]
    assert schemas["CompletionRequest"]["properties"]["priority"]["enum"] == [None, 0]
