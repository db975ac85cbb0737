"""Tests tool calls and reasoning in the Responses and Messages APIs, with the official clients and
vLLM's own parsers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio

pytest.importorskip("vllm")  # must come before the import of test_tool_calls, which also needs vLLM

from pdmesh.v1.common_pb2 import ROLE_DECODE
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.integration.gateway.api.test_tool_calls import (
    _TEMPLATE,
    ARGUMENTS,
    CALL,
    OTHER_CALL,
    answers,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

THOUGHT, SAID = "let me see", "one moment"
ANSWER = f"{THOUGHT}</think>{SAID}{CALL}{OTHER_CALL}"
TOWN = {"town": "Köln", "n": [1, 2]}
SCHEMA = {"type": "object"}
FUNCTIONS: list[Any] = [
    {"type": "function", "name": name, "parameters": SCHEMA} for name in ("weather", "time")
]
TOOLS: list[Any] = [{"name": name, "input_schema": SCHEMA} for name in ("weather", "time")]
ASKED: list[Any] = [{"role": "user", "content": "Weather?"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayMesh]:
    directory = tmp_path_factory.mktemp("formats")
    async with gateway_mesh(
        directory, 2, 2, template=_TEMPLATE, model_type="qwen3", responses_max_count=0
    ) as mesh:
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: GatewayMesh) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{mesh.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def claude(mesh: GatewayMesh) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=mesh.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_has_a_block_for_each_thought_text_and_call(
    mesh: GatewayMesh, claude: anthropic.AsyncAnthropic, stream: bool
) -> None:
    num_tokens = answers(mesh, ANSWER)
    asked: dict[str, Any] = {"messages": ASKED, "tools": TOOLS, "max_tokens": 400}
    if stream:
        async with claude.messages.stream(model="tiny", **asked) as events:
            message: Any = await events.get_final_message()
    else:
        message = await claude.messages.create(model="tiny", **asked)
    thought, said, call, other = message.content
    assert (thought.type, thought.thinking) == ("thinking", THOUGHT)
    assert thought.signature
    assert (said.type, said.text) == ("text", SAID)
    assert (call.type, call.name, call.input) == ("tool_use", "weather", TOWN)
    assert (other.type, other.name, other.input) == ("tool_use", "time", {})
    assert call.id != other.id
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens == num_tokens
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": each.id, "content": "sunny"}
        for each in (call, other)
    ]
    content: Any = [block.model_dump(exclude_none=True) for block in message.content]
    answers(mesh, "</think>sun")
    after = await claude.messages.create(
        model="tiny", max_tokens=400, tools=TOOLS,
        messages=[*ASKED, {"role": "assistant", "content": content},
                  {"role": "user", "content": results}],
    )  # fmt: skip
    assert [b.text for b in after.content if b.type == "text"] == ["sun"]
    assert after.stop_reason == "end_turn"


async def test_the_thinking_budget_of_a_message_bounds_its_reasoning(
    mesh: GatewayMesh, claude: anthropic.AsyncAnthropic
) -> None:
    answers(mesh, ANSWER)
    legs_before = [len(instance.prefills) for instance in mesh.instances.values()]
    message = await claude.messages.create(
        model="tiny", messages=ASKED, max_tokens=2000,
        thinking={"type": "enabled", "budget_tokens": 1024},
    )  # fmt: skip
    assert message.content[0].type == "thinking"
    prefills = [
        i.prefills[num:] for i, num in zip(mesh.instances.values(), legs_before, strict=True)
    ]
    told = [leg.sampling.shaping.thinking_token_budget for legs in prefills for leg in legs]
    assert [each.num_tokens for each in told] == [1024]
    with pytest.raises(anthropic.BadRequestError, match="budget_tokens"):
        await claude.messages.create(
            model="tiny", messages=ASKED, max_tokens=2000,
            thinking={"type": "enabled", "budget_tokens": -2},
        )  # fmt: skip


async def test_the_blocks_of_a_streamed_message_open_and_close_in_order(
    mesh: GatewayMesh, claude: anthropic.AsyncAnthropic
) -> None:
    answers(mesh, ANSWER)
    events: Any = await claude.messages.create(
        model="tiny", messages=ASKED, tools=TOOLS, max_tokens=400, stream=True
    )
    open_block: int | None = None
    pieces: dict[int, str] = {}
    async for event in events:
        if event.type == "content_block_start":
            assert open_block is None
            open_block = event.index
            pieces[event.index] = ""
        elif event.type == "content_block_delta":
            assert event.index == open_block
            if event.delta.type == "input_json_delta":
                pieces[event.index] += event.delta.partial_json
        elif event.type == "content_block_stop":
            assert event.index == open_block
            open_block = None
    assert list(pieces) == [0, 1, 2, 3]
    assert (pieces[2], pieces[3]) == (ARGUMENTS, "{}")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_has_an_item_for_each_thought_text_and_call(
    mesh: GatewayMesh, client: openai.AsyncOpenAI, stream: bool
) -> None:
    num_tokens = answers(mesh, ANSWER)
    asked: dict[str, Any] = {"input": "Weather?", "tools": FUNCTIONS, "max_output_tokens": 400}
    response: Any
    if stream:
        async with client.responses.stream(model="tiny", **asked) as events:
            numbers = [event.sequence_number async for event in events]
            response = await events.get_final_response()
        assert numbers == sorted(numbers)
    else:
        response = await client.responses.create(model="tiny", **asked)
    thought, said, call, other = response.output
    assert (thought.type, thought.content[0].text) == ("reasoning", THOUGHT)
    assert (said.type, said.content[0].text) == ("message", SAID)
    assert (call.type, call.name, call.arguments) == ("function_call", "weather", ARGUMENTS)
    assert (other.name, other.arguments) == ("time", "{}")
    assert response.status == "completed"
    assert response.usage.output_tokens == num_tokens
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    results: list[Any] = [
        {"type": "function_call_output", "call_id": each.call_id, "output": "sunny"}
        for each in (call, other)
    ]
    items: list[Any] = [item.model_dump(exclude_none=True) for item in response.output]
    items = [{k: v for k, v in item.items() if k != "parsed_arguments"} for item in items]
    answers(mesh, "</think>sun")
    after = await client.responses.create(
        model="tiny", tools=FUNCTIONS, input=[*ASKED, *items, *results]
    )
    assert after.output_text == "sun"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_responses_text_has_the_log_probabilities_of_its_own_tokens(
    mesh: GatewayMesh, client: openai.AsyncOpenAI, stream: bool
) -> None:
    """The log probabilities must leave out the tokens of the reasoning and of the calls, even if
    all tokens come at once.
    """
    for instance in mesh.instances.values():
        instance.supports_logprobs = True
        mesh.register(instance.record())
    answers(mesh, ANSWER)
    asked: dict[str, Any] = {
        "input": "Weather?", "tools": FUNCTIONS, "max_output_tokens": 400,
        "include": ["message.output_text.logprobs"],
    }  # fmt: skip
    if stream:
        async with client.responses.stream(model="tiny", **asked) as events:
            response: Any = await events.get_final_response()
    else:
        response = await client.responses.create(model="tiny", **asked)
    (part,) = next(item for item in response.output if item.type == "message").content
    assert part.text == SAID
    spelt = b"".join(bytes(each.bytes) for each in part.logprobs)
    assert spelt.decode() == SAID


async def test_streamed_arguments_are_those_of_the_item(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    answers(mesh, ANSWER)
    stream: Any = await client.responses.create(
        model="tiny", input="Weather?", tools=FUNCTIONS, max_output_tokens=400, stream=True
    )
    added: list[Any] = []
    pieces: dict[str, str] = {}
    async for event in stream:
        if event.type == "response.output_item.added":
            added.append(event.item)
            pieces[event.item.id] = ""
        elif event.type.endswith("arguments.delta"):
            assert event.item_id == added[-1].id
            pieces[event.item_id] += event.delta
        elif event.type.endswith("arguments.done"):
            assert pieces[event.item_id] == event.arguments
        elif event.type == "response.completed":
            assert [i.id for i in event.response.output] == [i.id for i in added]
    assert [i.type for i in added] == ["reasoning", "message", "function_call", "function_call"]
    assert list(pieces.values())[2:] == [ARGUMENTS, "{}"]


@pytest.mark.fault("F7")
@pytest.mark.parametrize("breaks_at", [2, 20, 60])
async def test_tool_calls_are_whole_even_if_a_decode_dies_within_them(
    mesh: GatewayMesh,
    client: openai.AsyncOpenAI,
    claude: anthropic.AsyncAnthropic,
    breaks_at: int,
) -> None:
    answers(mesh, ANSWER)
    decodes = [i for i in mesh.instances.values() if i.role == ROLE_DECODE]
    for decode in decodes:
        decode.breaks_at = breaks_at
    async with client.responses.stream(
        model="tiny", input="Weather?", tools=FUNCTIONS, max_output_tokens=400
    ) as events:
        response: Any = await events.get_final_response()
    assert response.output[2].arguments == ARGUMENTS
    for decode in decodes:
        decode.breaks_at = breaks_at
    async with claude.messages.stream(
        model="tiny", messages=ASKED, tools=TOOLS, max_tokens=400
    ) as stream:
        message: Any = await stream.get_final_message()
    assert message.content[2].input == TOWN
