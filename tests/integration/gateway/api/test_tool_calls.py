"""Tests tool calls and reasoning with the official openai client and vLLM's own parsers.

Fake instances write a given answer, so that the tests know which calls and which text the client
must receive. A leg is a request's stay on one instance.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import openai
import pytest
import pytest_asyncio

from pdmesh.v1 import inference_service_pb2 as pb
from pdmesh.v1.common_pb2 import ROLE_DECODE
from pdmesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.fakes.tiny_model import EOS
from tests.support.api.documented_answers import check_answers, routes_of
from tests.support.waiting import until

pytest.importorskip("vllm")
pytestmark = pytest.mark.asyncio(loop_scope="module")

_TEMPLATE = """{% if tools %}# Tools: <tool_call>
{"name": <name>, "arguments": <object>}
</tool_call>{{ tools | tojson }}{% endif %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls | default('') }}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% if enable_thinking is defined %}</think>{% endif %}
{%- endif %}"""
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("weather", "time")
]
USER: list[Any] = [{"role": "user", "content": "Weather?"}]
ARGUMENTS = '{"town": "K\u00f6ln", "n": [1, 2]}'
CALL = '<tool_call>\n{"name": "weather", "arguments": ' + ARGUMENTS + "}\n</tool_call>"
OTHER_CALL = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayMesh]:
    """A mesh whose model has a chat template like that of Hermes, and the model type of Qwen 3."""
    directory = tmp_path_factory.mktemp("tools")
    async with gateway_mesh(
        directory, num_prefills=2, num_decodes=2, template=_TEMPLATE, model_type="qwen3"
    ) as mesh:
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: GatewayMesh) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{mesh.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def answers(mesh: GatewayMesh, text: str) -> int:
    """Make all instances write `text`, and return its number of tokens."""
    script = [*mesh.tokenizer._encode(text, add_special_tokens=False), EOS]
    for instance in mesh.instances.values():
        instance.script, instance.step_s, instance.breaks_at = script, 0.0, None
    return len(script)


@dataclass
class Read:
    """The content of a stream, joined in the way in which clients join it."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    finish_reason: str | None = None
    num_chunks: int = 0

    def add(self, choice: Any) -> None:
        delta = choice.delta
        self.num_chunks += 1
        self.content += delta.content or ""
        self.reasoning += getattr(delta, "reasoning_content", None) or ""
        assert self.finish_reason is None, "nothing comes after the end"
        self.finish_reason = choice.finish_reason
        for call in delta.tool_calls or ():
            if call.index not in self.calls:
                assert call.index == len(self.calls)
                assert call.id
                assert call.function.name
                assert call.type == "function"
                self.calls[call.index] = {"id": call.id, "name": call.function.name, "args": ""}
            else:
                assert (call.id, call.function.name) == (None, None), "told once"
            self.calls[call.index]["args"] += call.function.arguments or ""

    @property
    def called(self) -> list[tuple[str, Any]]:
        ids = [call["id"] for call in self.calls.values()]
        assert len(set(ids)) == len(ids)
        return [(call["name"], json.loads(call["args"])) for call in self.calls.values()]


async def streamed(client: openai.AsyncOpenAI, **asked: Any) -> Read:
    (read,) = await all_streamed(client, **asked)
    return read


async def all_streamed(client: openai.AsyncOpenAI, n: int = 1, **asked: Any) -> Sequence[Read]:
    given: Any = {"model": "tiny", "messages": USER, "tools": TOOLS, "max_tokens": 400, **asked}
    stream = await client.chat.completions.create(stream=True, n=n, **given)
    reads = [Read() for _ in range(n)]
    async for chunk in stream:
        for choice in chunk.choices:
            reads[choice.index].add(choice)
    return reads


THINK_END = 258  # the token id of `</think>` in the tiny model
WEATHER = ("weather", {"town": "Köln", "n": [1, 2]})


async def test_a_streamed_answer_has_reasoning_text_and_calls(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    num = answers(mesh, f"<think>I look.</think>Let me see. {CALL}\n{OTHER_CALL}")
    read = await streamed(client)
    assert read.reasoning == "I look."
    assert read.content.strip() == "Let me see."
    assert read.called == [WEATHER, ("time", {})]
    assert read.finish_reason == "tool_calls"
    assert num > 100
    assert mesh.num_legs == 0


async def test_a_whole_answer_has_the_same_reasoning_text_and_calls(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    answers(mesh, f"<think>I look.</think>{CALL}\n{OTHER_CALL}")
    answer = await client.chat.completions.create(
        model="tiny", messages=USER, tools=TOOLS, max_tokens=400
    )
    (choice,) = answer.choices
    calls: Any = choice.message.tool_calls
    assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [
        WEATHER,
        ("time", {}),
    ]
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert choice.message.model_extra == {"reasoning": "I look.", "reasoning_content": "I look."}
    usage: Any = answer.usage
    assert usage.completion_tokens_details.reasoning_tokens >= 0
    conversation = [
        *USER,
        choice.message,
        *({"role": "tool", "tool_call_id": c.id, "content": "5"} for c in calls),
    ]
    answers(mesh, "</think>Five.")
    answer = await client.chat.completions.create(
        model="tiny", messages=conversation, tools=TOOLS, max_tokens=40
    )
    assert answer.choices[0].message.content == "Five."
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("post_v1_chat_completions", {"messages": USER, "max_tokens": 400, "tools": TOOLS}),
        (
            "post_v1_responses",
            {
                "input": "Weather?",
                "max_output_tokens": 400,
                "tools": [{"type": "function", **tool["function"]} for tool in TOOLS],
            },
        ),
        (
            "post_v1_messages",
            {
                "messages": USER,
                "max_tokens": 400,
                "tools": [
                    {"name": tool["function"]["name"], "input_schema": {"type": "object"}}
                    for tool in TOOLS
                ],
            },
        ),
    ],
)
async def test_reasoning_and_calls_are_as_documented(
    mesh: GatewayMesh, name: str, asked: dict[str, Any]
) -> None:
    answers(mesh, f"<think>I look.</think>Let me see. {CALL}\n{OTHER_CALL}")
    async with httpx.AsyncClient(base_url=mesh.url, timeout=60) as http:
        await check_answers(http, routes_of(mesh)[name], {"model": "tiny", **asked})


@pytest.mark.fault("F7")
async def test_a_decode_that_dies_at_any_token_breaks_no_delta(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    text = f"<think>Hm</think>{CALL}"
    num = answers(mesh, text)
    unbroken = await streamed(client)
    for at in range(1, num):
        answers(mesh, text)
        for instance in mesh.instances.values():
            if instance.role == ROLE_DECODE:
                instance.breaks_at = at
        read = await streamed(client)
        assert (read.reasoning, read.content, read.called, read.finish_reason) == (
            unbroken.reasoning,
            unbroken.content,
            unbroken.called,
            unbroken.finish_reason,
        ), at
    assert unbroken.called == [WEATHER]


async def test_each_choice_has_its_own_calls(mesh: GatewayMesh, client: openai.AsyncOpenAI) -> None:
    answers(mesh, f"</think>{CALL}\n{OTHER_CALL}")
    reads = await all_streamed(client, n=3)
    assert [read.called for read in reads] == [[WEATHER, ("time", {})]] * 3
    ids = {call["id"] for read in reads for call in read.calls.values()}
    assert len(ids) == 6


def grammars(mesh: GatewayMesh) -> set[str]:
    """The grammars of all legs since the last call of this function."""
    told = [leg.sampling.constraint for i in mesh.instances.values() for leg in i.prefills]
    told += [leg.sampling.constraint for i in mesh.instances.values() for leg in i.starts]
    found = {(constraint.grammar, tuple(constraint.begins_after)) for constraint in told}
    for instance in mesh.instances.values():
        instance.prefills.clear()
        instance.starts.clear()
    assert {marker for grammar, marker in found if grammar} <= {(THINK_END,)}
    return {grammar for grammar, _ in found}


@pytest.mark.parametrize(
    ("asked", "expected", "reason"),
    [
        ({"tool_choice": "required"}, {"weather", "time"}, "tool_calls"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, {"weather"},
            "stop"),
        ({"parallel_tool_calls": False}, {"weather", "time"}, "tool_calls"),
        ({"tools": [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]},
            {"weather"}, "tool_calls"),
    ],
)  # fmt: skip
async def test_calls_with_a_grammar_are_drawn_by_it_after_the_reasoning(
    mesh: GatewayMesh,
    client: openai.AsyncOpenAI,
    asked: dict[str, Any],
    expected: set[str],
    reason: str,
) -> None:
    """Each leg gets the grammar of the tool calls in vLLM's form, and the token after which the
    grammar begins.
    """
    answers(mesh, f"<think>hm</think>{CALL}")
    grammars(mesh)
    read = await streamed(client, **asked)
    assert (read.called, read.finish_reason) == ([WEATHER], reason)
    (grammar,) = grammars(mesh)
    assert {name for name in ("weather", "time") if f'\\"{name}\\"' in grammar} == expected
    assert "<tool_call>" in grammar
    await streamed(client)
    assert grammars(mesh) == {""}, "a model that may write anything is not bound"


@pytest.mark.parametrize(
    "asked",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "bad"}}},
        {"parallel_tool_calls": False},
        {},
    ],
)
async def test_the_refusal_of_a_schema_of_arguments_names_its_tool(
    mesh: GatewayMesh, client: openai.AsyncOpenAI, asked: dict[str, Any]
) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "strict": True, "parameters": schema}}
        for name, schema in (("good", {"type": "object"}), ("bad", {"type": "strin"}))
    ]
    grammars(mesh)
    with pytest.raises(openai.BadRequestError, match="Invalid type: strin") as caught:
        await streamed(client, tools=tools, **asked)
    assert caught.value.param == "tools[1].function.parameters"
    assert grammars(mesh) == set(), "it takes no slot"


def budgets(mesh: GatewayMesh) -> list[tuple[int, list[int], list[int]]]:
    """The thinking budgets of all legs since the last call of this function."""
    sampling = [leg.sampling for i in mesh.instances.values() for leg in i.prefills]
    sampling += [leg.sampling for i in mesh.instances.values() for leg in i.starts]
    told = [each.shaping.thinking_token_budget for each in sampling]
    for instance in mesh.instances.values():
        instance.prefills.clear()
        instance.starts.clear()
    return [(each.num_tokens, list(each.begin), list(each.end)) for each in told]


@pytest.mark.fault("F7")
async def test_each_leg_gets_the_thinking_budget_and_the_models_marks(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    answers(mesh, "<think>hm</think>Fine, and so on.")
    for instance in mesh.instances.values():
        instance.breaks_at = 6 if instance.role == ROLE_DECODE else None
    budgets(mesh)
    asked = {"thinking_token_budget": 5}
    read = await streamed(client, tools=openai.NOT_GIVEN, extra_body=asked)
    assert (read.reasoning, read.content.strip()) == ("hm", "Fine, and so on.")
    found = budgets(mesh)
    assert len(found) >= 4, "two of them came after a death"
    assert found == [(5, [THINK_END - 1], [THINK_END])] * len(found)
    answers(mesh, "Fine.")
    await client.completions.create(model="tiny", prompt="a", max_tokens=5, extra_body=asked)
    params = pb.GenerationParams(max_tokens=5, thinking_token_budget=5)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{mesh.gateway.grpc.port}") as channel:
        stub = InferenceServiceStub(channel)
        await stub.Generate(pb.GenerateRequest(model="tiny", text="abc", params=params))
    assert set(map(str, budgets(mesh))) == {str(found[0])}
    await streamed(client, extra_body={"thinking_token_budget": -1})
    assert {num for num, _, _ in budgets(mesh)} == {0}


@pytest.mark.parametrize("budget", [-2, 1 << 31])
async def test_a_thinking_budget_that_no_engine_takes_is_refused(
    client: openai.AsyncOpenAI, budget: int
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await streamed(client, extra_body={"thinking_token_budget": budget})
    assert caught.value.param == "thinking_token_budget"


async def test_forms_for_both_the_answer_and_its_tool_calls_are_refused(
    client: openai.AsyncOpenAI,
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await streamed(client, parallel_tool_calls=False, response_format={"type": "json_object"})
    assert caught.value.param == "response_format"


@pytest.mark.fault("F7")
async def test_a_parser_process_that_dies_is_replaced_and_no_delta_is_broken(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    """The parser process dies in the middle of a tool call. The next parser process must not repeat
    any output.
    """
    answers(mesh, f"</think>Well. {CALL}")
    unbroken = await streamed(client)
    parsers = mesh.gateway.frontend.shared.parsers
    for instance in mesh.instances.values():
        instance.step_s = 0.002
    given: Any = {"model": "tiny", "messages": USER, "tools": TOOLS, "max_tokens": 400}
    read, lost = Read(), 0
    async for chunk in await client.chat.completions.create(stream=True, **given):
        for choice in chunk.choices:
            read.add(choice)
        if not lost and read.calls and read.calls[0]["args"]:
            assert parsers.pid is not None
            os.kill(lost := parsers.pid, signal.SIGKILL)
    assert (read.content, read.called) == (unbroken.content, unbroken.called)
    assert lost
    assert parsers.pid not in (None, lost)


async def test_after_a_client_has_left_the_parsers_keep_nothing_of_its_answer(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    answers(mesh, f"</think>{'word ' * 60}{CALL}")
    for instance in mesh.instances.values():
        instance.step_s = 0.01
    given: Any = {"model": "tiny", "messages": USER, "tools": TOOLS, "max_tokens": 400}
    stream = await client.chat.completions.create(stream=True, **given)
    async for _ in stream:
        break
    await stream.close()
    await until(lambda: mesh.num_legs == 0)
    answers(mesh, CALL)
    assert (await streamed(client)).finish_reason is not None


async def test_without_reasoning_only_the_answer_is_reported(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    answers(mesh, "<think>secret</think>Fine.")
    read = await streamed(client, extra_body={"include_reasoning": False, "return_token_ids": True})
    assert (read.reasoning, read.content.strip()) == ("", "Fine.")


async def test_a_reasoning_model_is_parsed_even_in_a_chat_without_tools(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    answers(mesh, "<think>hm</think>Fine.")
    read = await streamed(client, tools=openai.NOT_GIVEN)
    assert (read.reasoning, read.content.strip(), read.finish_reason) == ("hm", "Fine.", "stop")


async def test_an_answer_without_thinking_begins_at_once(
    mesh: GatewayMesh, client: openai.AsyncOpenAI
) -> None:
    answers(mesh, "Fine.")
    read = await streamed(client, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert (read.reasoning, read.content) == ("", "Fine.")
