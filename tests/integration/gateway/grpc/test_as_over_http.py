"""Sends the same request over HTTP and over gRPC. Both must cause equal commands to the instances
and get equal answers.

`test_grpc_tools` does the same for tool calls and reasoning, because they need vLLM's parsers.
"""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdmesh.net.grpc import rpc
from pdmesh.v1 import inference_service_pb2 as pb
from pdmesh.v1.common_pb2 import ROLE_DECODE
from pdmesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.fakes.gateway_mesh import GatewayMesh
from tests.support.api.two_apis import legs, over_grpc, over_http

USER: list[Any] = [{"role": "user", "content": "hello"}]
SAID = [pb.ChatMessage(role="user", content="hello")]
SCHEMA = '{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"]}'
# For each feature, the fields of the HTTP request, the fields of gRPC's params, and the fields of
# gRPC's request. All omit the prompt.
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "seed": ({"seed": 7, "temperature": 0.7}, {"seed": 7, "temperature": 0.7}, {}),
    "choices": ({"n": 3, "seed": 1}, {"seed": 1}, {"n": 3}),
    "penalties": (
        {"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
        {"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
        {},
    ),
    "few tokens": (
        {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "allowed_token_ids": [3, 1]},
        {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "allowed_token_ids": [3, 1]},
        {},
    ),
    "biases": (
        {"logit_bias": {"5": 1.5, "9": -100}, "bad_words": ["no"]},
        {"logit_bias": {5: 1.5, 9: -100}, "bad_words": ["no"]},
        {},
    ),
    "ends": (
        {"stop_token_ids": [70], "min_tokens": 2, "ignore_eos": True, "stop": ["zz"],
         "include_stop_str_in_output": True, "skip_special_tokens": False},
        {"stop_token_ids": [70], "min_tokens": 2, "ignore_eos": True, "stop": ["zz"],
         "include_stop_in_output": True, "show_special_tokens": True},
        {},
    ),
    "cut": (
        {"truncate_prompt_tokens": 3}, {"truncate_prompt_tokens": 3}, {},
    ),
    "cut on the right": (
        {"truncate_prompt_tokens": 3, "truncation_side": "right"},
        {"truncate_prompt_tokens": 3, "truncation_side": pb.TRUNCATION_SIDE_RIGHT},
        {},
    ),
    "token ids": ({"return_token_ids": True}, {"return_token_ids": True}, {}),
    "a form": (
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_output": pb.StructuredOutput(json_schema=SCHEMA)},
        {},
    ),
    "a salt": ({"cache_salt": "mine"}, {}, {"cache_salt": "mine"}),
}  # fmt: skip


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_each_feature_gives_the_same_over_both_apis(
    mesh: GatewayMesh, kind: str, feature: str, is_streamed: bool
) -> None:
    body, params, beside = FEATURES[feature]
    given: dict[str, Any] = {
        "model": "tiny", "params": pb.GenerationParams(max_tokens=12, **params), **beside
    }  # fmt: skip
    request: pb.ChatRequest | pb.GenerateRequest
    if kind == "chat":
        body, request = {**body, "messages": USER}, pb.ChatRequest(messages=SAID, **given)
    else:
        body, request = {**body, "prompt": "hello"}, pb.GenerateRequest(text="hello", **given)
        body.setdefault("return_token_ids", True)  # an answer over gRPC always has token ids
    expected = await over_http(mesh, {"max_tokens": 12, **body}, is_streamed=is_streamed)
    asked = legs(mesh)
    assert asked
    answer = await over_grpc(mesh, request, is_streamed=is_streamed)
    if kind == "completion" and feature != "token ids":
        for said in expected.choices.values():
            said.prompt_token_ids = []
    assert answer == expected
    assert legs(mesh) == asked
    assert len(answer.choices) == (request.n or 1)
    assert answer.num_parts > 1 or not is_streamed


@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_logprobs_are_the_same(mesh: GatewayMesh, kind: str) -> None:
    for instance in mesh.instances.values():
        instance.supports_logprobs = True
        mesh.register(instance.record())
    params = pb.GenerationParams(max_tokens=5, num_logprobs=2, num_prompt_logprobs=1)
    body: dict[str, Any] = {"max_tokens": 5, "prompt_logprobs": 1}
    request: pb.ChatRequest | pb.GenerateRequest
    if kind == "chat":
        body |= {"messages": USER, "logprobs": True, "top_logprobs": 2}
        request = pb.ChatRequest(messages=SAID, params=params)
    else:
        body |= {"prompt": "hello", "logprobs": 2, "return_token_ids": True}
        request = pb.GenerateRequest(text="hello", params=params)
    expected = await over_http(mesh, body, is_streamed=False)
    asked = legs(mesh)
    answer = await over_grpc(mesh, request, is_streamed=False)
    assert legs(mesh) == asked
    expected.of(0).prompt_token_ids = []
    assert answer == expected
    assert answer.of(0).num_logprobs == 5


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("max_tokens", [4, 0])
async def test_echoes_of_several_prompts_are_the_same(
    mesh: GatewayMesh, max_tokens: int, is_streamed: bool
) -> None:
    body = {"prompt": ["ab", "xyz"], "echo": True, "max_tokens": max_tokens, "n": 2}
    request = pb.GenerateRequest(
        text="ab",
        further_prompts=[pb.Prompt(text="xyz")],
        echo=True,
        n=2,
        params=pb.GenerationParams(max_tokens=max_tokens),
    )
    expected = await over_http(mesh, body, is_streamed=is_streamed)
    answer = await over_grpc(mesh, request, is_streamed=is_streamed)
    texts = [said.text for said in answer.choices.values()]
    assert sorted(texts) == sorted(said.text for said in expected.choices.values())
    own = [mesh.expected_text(prompt, max_tokens) if max_tokens else "" for prompt in ("ab", "xyz")]
    assert sorted(texts) == sorted(["ab" + own[0]] * 2 + ["xyz" + own[1]] * 2)
    assert answer.usage == expected.usage
    assert {len(said.token_ids) for said in answer.choices.values()} == {max_tokens}


async def test_each_message_has_the_usage_so_far_on_request(mesh: GatewayMesh) -> None:
    request = pb.ChatRequest(messages=SAID, params=pb.GenerationParams(max_tokens=20))
    async with rpc.channel(f"127.0.0.1:{mesh.gateway.grpc.port}") as channel:
        stream = InferenceServiceStub(channel).ChatStream(
            pb.ChatStreamRequest(request=request, continuous_usage=True)
        )
        counts = [part.usage.num_completion_tokens async for part in stream]
    assert counts == sorted(counts)
    assert (counts[-1], len(counts) > 1) == (20, True)


async def test_tokens_and_text_are_the_same(mesh: GatewayMesh) -> None:
    async with (
        rpc.channel(f"127.0.0.1:{mesh.gateway.grpc.port}") as channel,
        httpx.AsyncClient(base_url=mesh.url) as http,
    ):
        stub = InferenceServiceStub(channel)
        for body, request in (
            ({"prompt": "hello"}, pb.TokenizeRequest(text="hello")),
            ({"messages": USER}, pb.TokenizeRequest(messages=SAID)),
            (
                {"messages": USER, "add_generation_prompt": False, "return_token_strs": True},
                pb.TokenizeRequest(
                    messages=SAID, add_generation_prompt=False, return_token_strs=True
                ),
            ),
        ):
            expected = (await http.post("/tokenize", json={"model": "tiny", **body})).json()
            found = await stub.Tokenize(request)
            assert list(found.token_ids) == expected["tokens"]
            assert found.max_model_len == expected["max_model_len"]
            assert list(found.token_strs) == (expected["token_strs"] or [])
            asked = {"model": "tiny", "tokens": expected["tokens"]}
            text = (await http.post("/detokenize", json=asked)).json()["prompt"]
            back = await stub.Detokenize(pb.DetokenizeRequest(token_ids=found.token_ids))
            assert back.text == text
        for call, field in (
            (stub.Tokenize(pb.TokenizeRequest()), "text"),
            (stub.Detokenize(pb.DetokenizeRequest(token_ids=[1 << 20])), "token_ids"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert rpc.from_rpc_error(caught.value).field == field


async def test_models_are_the_same(mesh: GatewayMesh) -> None:
    async with (
        rpc.channel(f"127.0.0.1:{mesh.gateway.grpc.port}") as channel,
        httpx.AsyncClient(base_url=mesh.url) as http,
    ):
        (expected,) = (await http.get("/v1/models")).json()["data"]
        (found,) = (await InferenceServiceStub(channel).ListModels(pb.ListModelsRequest())).infos
    assert (found.name, found.max_model_len) == (expected["id"], expected["max_model_len"])
    assert found.parent == (expected["parent"] or "")
    assert abs(found.created_at_s - expected["created"]) <= 1


@pytest.mark.fault("F7")
@pytest.mark.parametrize("at", [2, 5, 11])
async def test_a_stream_continues_after_a_death(mesh: GatewayMesh, at: int) -> None:
    for instance in mesh.instances.values():
        instance.breaks_at = at if instance.role == ROLE_DECODE else None
    request = pb.ChatRequest(messages=SAID, params=pb.GenerationParams(max_tokens=12))
    answer = await over_grpc(mesh, request, is_streamed=True)
    assert answer.of(0).text == mesh.expected_text(mesh.chat_prompt("hello"), 12)
    assert len(legs(mesh)) > 2, "another leg followed the death"


async def test_a_failure_comes_after_the_text_so_far(mesh: GatewayMesh) -> None:
    """As over HTTP, the client gets the text so far, and then the error."""
    for instance in mesh.instances.values():
        instance.step_s = 0.01
    request = pb.ChatRequest(messages=SAID, params=pb.GenerationParams(max_tokens=4000))
    async with rpc.channel(f"127.0.0.1:{mesh.gateway.grpc.port}") as channel:
        stream = InferenceServiceStub(channel).ChatStream(pb.ChatStreamRequest(request=request))
        texts: list[str] = []

        async def read() -> None:
            async for part in stream:
                if not texts:
                    await mesh.gateway.frontend.drain(0)
                texts.append(part.content)

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    text = "".join(texts)
    assert text
    assert mesh.expected_text(mesh.chat_prompt("hello"), 4000).startswith(text)


@pytest.mark.parametrize(
    ("symbol", "within"),
    [
        ("pdmesh.v1.InferenceService", "Detokenize"),
        ("pdmesh.v1.ChatRequest", "chat_template_kwargs"),
        ("pdmesh.v1.ToolChoice", "TOOL_CHOICE_MODE_REQUIRED"),
        ("pdmesh.v1.ToolCallDelta", "arguments"),
        ("pdmesh.v1.ReasoningEffort", "REASONING_EFFORT_HIGH"),
        ("pdmesh.v1.FinishReason", "FINISH_REASON_TOOL_CALLS"),
    ],
)
async def test_reflection_shows_the_service(mesh: GatewayMesh, symbol: str, within: str) -> None:
    asks = reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)
    async with rpc.channel(f"127.0.0.1:{mesh.gateway.grpc.port}") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        replies = [reply async for reply in stub.ServerReflectionInfo(iter([asks]))]
    file = b"".join(replies[0].file_descriptor_response.file_descriptor_proto)
    assert symbol.rsplit(".", maxsplit=1)[-1].encode() in file
