"""Tests that tool calls and reasoning work over gRPC as over HTTP, with vLLM's own parsers.

Fake instances write a given answer, so that the tests know which calls and which text the client
must receive.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

pytest.importorskip("vllm")  # the module test_tool_calls also needs vLLM

from pdmesh.net.grpc import rpc
from pdmesh.v1 import inference_service_pb2 as pb
from pdmesh.v1.common_pb2 import ROLE_DECODE
from pdmesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.integration.gateway.api.test_tool_calls import (
    _TEMPLATE,
    ARGUMENTS,
    CALL,
    OTHER_CALL,
    THINK_END,
    answers,
)
from tests.support.api.two_apis import legs, over_grpc, over_http
from tests.support.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

# The values are Any because they are JSON over HTTP and parts of messages over gRPC.
Json = dict[str, Any]
SCHEMA = '{"type":"object","properties":{"z":{"type":"number","minimum":1},"a":{"maximum":1.0}}}'
HTTP_TOOLS: list[Json] = [
    {"type": "function", "function": {"name": name, "parameters": json.loads(SCHEMA)}}
    for name in ("weather", "time")
]
TOOLS = [
    pb.Tool(function=pb.FunctionDefinition(name=name, parameters=SCHEMA))
    for name in ("weather", "time")
]
STRICT = pb.FunctionDefinition(name="weather", parameters=SCHEMA, strict=True)
HTTP_STRICT: Json = {**HTTP_TOOLS[0], "function": {**HTTP_TOOLS[0]["function"], "strict": True}}
USER = pb.ChatMessage(role="user", content="Weather?")
HTTP_USER: Json = {"role": "user", "content": "Weather?"}
THOUGHT = "<think>I look.</think>"
FORM = '{"type":"object"}'

# For each feature: the text that the model writes, and the fields that are added to the common
# request or replace its fields, first over HTTP (`asked_over_http`), then over gRPC
# (`asked_over_grpc`).
FEATURES: dict[str, tuple[str, Json, Json]] = {
    "calls": (f"{THOUGHT}Let me see. {CALL}\n{OTHER_CALL}", {}, {}),
    "no call": (f"{THOUGHT}Fine.", {}, {}),
    "a broken call": (f"{THOUGHT}{CALL[:40]}", {}, {}),
    "auto": (
        f"{THOUGHT}{CALL}",
        {"tool_choice": "auto"},
        {"tool_choice": pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_AUTO)},
    ),
    "none": (
        f"{THOUGHT}{CALL}",
        {"tool_choice": "none"},
        {"tool_choice": pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_NONE)},
    ),
    "required": (
        f"{THOUGHT}{CALL}",
        {"tool_choice": "required"},
        {"tool_choice": pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED)},
    ),
    "named": (
        f"{THOUGHT}{CALL}",
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"tool_choice": pb.ToolChoice(function="weather")},
    ),
    "one call": (
        f"{THOUGHT}{CALL}", {"parallel_tool_calls": False}, {"parallel_tool_calls": False}
    ),
    "strict": (f"{THOUGHT}{CALL}", {"tools": [HTTP_STRICT]}, {"tools": [pb.Tool(function=STRICT)]}),
    "choices": (f"{THOUGHT}{CALL}\n{OTHER_CALL}", {"n": 3}, {"n": 3}),
    "no tools": (f"{THOUGHT}Fine.", {"tools": None}, {"tools": []}),
    "a form after the reasoning": (
        f"{THOUGHT}{{}}",
        {"tools": None, "structured_outputs": {"json": FORM}},
        {"tools": [], "params": {"structured_output": pb.StructuredOutput(json_schema=FORM)}},
    ),
    "no reasoning shown": (
        f"{THOUGHT}Fine.",
        {"include_reasoning": False, "return_token_ids": True},
        {"include_reasoning": False, "params": {"return_token_ids": True}},
    ),
    "token ids": (
        f"{THOUGHT}{CALL}", {"return_token_ids": True}, {"params": {"return_token_ids": True}}
    ),
    "effort": (
        f"{THOUGHT}Fine.",
        {"reasoning_effort": "high"},
        {"reasoning_effort": pb.REASONING_EFFORT_HIGH},
    ),
    "thinking switched off": (
        "Fine.",
        {"chat_template_kwargs": {"enable_thinking": False, "budget": 5}},
        {"chat_template_kwargs": '{"enable_thinking": false, "budget": 5}'},
    ),
    "results of calls": (
        f"{THOUGHT}Sunny.",
        {"messages": [
            {"role": "developer", "content": [{"type": "text", "text": t} for t in "pq"]},
            HTTP_USER,
            {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [
                {"id": "c1", "type": "function",
                 "function": {"name": "weather", "arguments": ARGUMENTS}}]},
            {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
        ]},
        {"messages": [
            pb.ChatMessage(
                role="developer", content_parts=[pb.ContentPart(text=t) for t in "pq"]
            ),
            USER,
            pb.ChatMessage(role="assistant", reasoning="hm", tool_calls=[
                pb.ToolCall(
                    id="c1", function=pb.FunctionCall(name="weather", arguments=ARGUMENTS)
                )]),
            pb.ChatMessage(role="tool", content="sunny", tool_call_id="c1"),
        ]},
    ),
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayMesh]:
    directory = tmp_path_factory.mktemp("grpc-tools")
    async with gateway_mesh(directory, 2, 2, template=_TEMPLATE, model_type="qwen3") as mesh:
        yield mesh


def asked_over_http(**further: Any) -> Json:
    body: Json = {"messages": [HTTP_USER], "tools": HTTP_TOOLS, "max_tokens": 400, **further}
    return {name: value for name, value in body.items() if value is not None}


def asked_over_grpc(params: Json | None = None, **further: Any) -> pb.ChatRequest:
    given: Json = {"messages": [USER], "tools": TOOLS, **further}
    return pb.ChatRequest(params=pb.GenerationParams(max_tokens=400, **(params or {})), **given)


@pytest.mark.parametrize("feature", FEATURES)
async def test_a_feature_is_the_same_whole_and_streamed(mesh: GatewayMesh, feature: str) -> None:
    text, http, grpc_ = FEATURES[feature]
    answers(mesh, text)
    legs(mesh)
    expected = await over_http(mesh, asked_over_http(**http), is_streamed=False)
    asked = legs(mesh)
    request = asked_over_grpc(**grpc_)
    whole = await over_grpc(mesh, request, is_streamed=False)
    assert legs(mesh) == asked
    streamed = await over_grpc(mesh, request, is_streamed=True)
    assert legs(mesh) == asked
    assert whole == expected
    assert streamed == await over_http(mesh, asked_over_http(**http), is_streamed=True)


async def test_calls_are_typed_and_their_pieces_add_up_to_the_whole(mesh: GatewayMesh) -> None:
    answers(mesh, f"{THOUGHT}Let me see. {CALL}\n{OTHER_CALL}")
    for instance in mesh.instances.values():
        instance.step_s = 0.004
    streamed = await over_grpc(mesh, asked_over_grpc(), is_streamed=True)
    assert streamed.num_parts > 5
    async with rpc.channel(f"127.0.0.1:{mesh.gateway.grpc.port}") as channel:
        answer = await InferenceServiceStub(channel).Chat(asked_over_grpc())
    message = answer.message
    assert (message.reasoning, message.content.strip()) == ("I look.", "Let me see.")
    assert [call.function.name for call in message.tool_calls] == ["weather", "time"]
    assert message.tool_calls[0].function.arguments == ARGUMENTS
    assert pb.DESCRIPTOR.pool.FindEnumTypeByName("pdmesh.v1.FinishReason").values_by_number[
        answer.finish_reason
    ].name == "FINISH_REASON_TOOL_CALLS"  # fmt: skip
    assert answer.usage.num_reasoning_tokens > 0
    said = streamed.of(0)
    assert (said.reasoning, said.text.strip()) == (message.reasoning, message.content.strip())
    assert said.calls == [[c.function.name, c.function.arguments] for c in message.tool_calls]
    assert said.finish_reason == "tool_calls"


async def test_a_form_begins_after_the_reasoning(mesh: GatewayMesh) -> None:
    answers(mesh, f"{THOUGHT}{{}}")
    form = {"structured_output": pb.StructuredOutput(json_schema=FORM)}
    for further in ({"tools": [], "params": form}, {"tool_choice": pb.ToolChoice(function="time")}):
        for instance in mesh.instances.values():
            instance.prefills.clear()
            instance.starts.clear()
        await over_grpc(mesh, asked_over_grpc(**further), is_streamed=True)
        told = [leg.sampling for i in mesh.instances.values() for leg in i.prefills]
        told += [leg.sampling for i in mesh.instances.values() for leg in i.starts]
        assert len(told) == 2
        for sampling in told:
            assert sampling.constraint.grammar
            assert list(sampling.constraint.begins_after) == [THINK_END]


@pytest.mark.fault("F7")
async def test_a_decode_that_dies_at_any_token_breaks_no_delta(mesh: GatewayMesh) -> None:
    text = f"<think>Hm</think>{CALL}"
    num = answers(mesh, text)
    unbroken = await over_grpc(mesh, asked_over_grpc(), is_streamed=True)
    for at in range(1, num):
        answers(mesh, text)
        for instance in mesh.instances.values():
            if instance.role == ROLE_DECODE:
                instance.breaks_at = at
        assert await over_grpc(mesh, asked_over_grpc(), is_streamed=True) == unbroken, at
    assert unbroken.of(0).calls == [["weather", ARGUMENTS]]


async def test_a_client_that_leaves_leaves_nothing_behind(mesh: GatewayMesh) -> None:
    answers(mesh, f"</think>{'word ' * 60}{CALL}")
    for instance in mesh.instances.values():
        instance.step_s = 0.01
    async with rpc.channel(f"127.0.0.1:{mesh.gateway.grpc.port}") as channel:
        request = pb.ChatStreamRequest(request=asked_over_grpc())
        stream = InferenceServiceStub(channel).ChatStream(request)
        async for _ in stream:
            break
        stream.cancel()
        await until(lambda: mesh.num_legs == 0 and mesh.gateway.frontend.num_calls == 0)
    answers(mesh, f"</think>{CALL}")
    assert (await over_grpc(mesh, asked_over_grpc(), is_streamed=True)).of(0).calls


@pytest.mark.parametrize(
    ("further", "field"),
    [
        ({"parallel_tool_calls": False,
          "params": {"structured_output": pb.StructuredOutput(json_object=True)}},
            "structured_output"),
        ({"tool_choice": pb.ToolChoice(function="nope")}, "tool_choice.function"),
        ({"tools": [pb.Tool(function=pb.FunctionDefinition(name="f", parameters="{"))]},
            "tools[0].function.parameters"),
        ({"tools": [pb.Tool(function=pb.FunctionDefinition(
            name="f", parameters='{"$ref": "#/nope"}', strict=True))]},
            "tools[0].function.parameters"),
        ({"messages": [pb.ChatMessage(role="tool", content="x", tool_call_id="c")]},
            "messages[0].tool_call_id"),
        ({"chat_template_kwargs": '{"messages": []}'}, "chat_template_kwargs.messages"),
    ],
)  # fmt: skip
async def test_an_invalid_field_gives_invalid_argument_and_is_named(
    mesh: GatewayMesh, further: Json, field: str
) -> None:
    legs(mesh)
    async with rpc.channel(f"127.0.0.1:{mesh.gateway.grpc.port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await InferenceServiceStub(channel).Chat(asked_over_grpc(**further))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert rpc.from_rpc_error(caught.value).field == field
    assert legs(mesh) == []
