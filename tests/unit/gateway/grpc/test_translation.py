"""A request over gRPC equals the same request over HTTP.

docs/api.md has a table of the fields of both APIs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.grpc.translation import chat_of, completion_of, tokenize_of
from pdmesh.services.gateway.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeRequest,
    check_chat,
    parse_chat,
    parse_completion,
    parse_tokenize,
    unsupported_fields,
)
from pdmesh.services.gateway.openai.translated import naming
from pdmesh.v1 import inference_service_pb2 as pb

_PAGE = (Path(__file__).parents[4] / "docs" / "api.md").read_text().partition("\n## gRPC")[2]
_TABLE = _PAGE.partition("| over HTTP | over gRPC |")[2].partition("\n\n")[0]
_ROWS = [line.split("|")[1:3] for line in _TABLE.splitlines() if "`" in line]
USER = pb.ChatMessage(role="user", content="x")
SCHEMA = '{"type": "object", "properties": {"z": {"minimum": 1}, "a": {"maximum": 1.0}}}'
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


def named(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def fields(message: Any) -> set[str]:
    return {field.name for field in message.DESCRIPTOR.fields}


def test_the_table_has_every_field_of_both_apis() -> None:
    over_http = {
        field
        for struct in (ChatCompletionRequest, CompletionRequest, TokenizeRequest)
        for field in struct.__struct_fields__
        if field not in unsupported_fields(struct)
    }
    assert {name for http, _ in _ROWS for name in named(http)} - {"parameters"} == over_http
    told = {
        name
        for http, grpc in _ROWS
        for name in named(http if "the same name" in grpc else grpc) - {"params"}
    }
    requests = (pb.ChatRequest, pb.GenerateRequest, pb.TokenizeRequest, pb.GenerationParams)
    known = set[str]().union(*map(fields, requests))
    assert known - told == {"params"}
    stream = fields(pb.ChatStreamRequest) | fields(pb.GenerateStreamRequest)
    assert stream <= told | {"request"}


SAMPLING: dict[str, Any] = {
    "max_tokens": 7, "temperature": 0.5, "top_p": 0.25, "seed": -3, "stop": ["a", "b"],
    "ignore_eos": True, "presence_penalty": 0.5, "frequency_penalty": -0.5,
    "repetition_penalty": 1.5, "top_k": 4, "min_p": 0.125, "min_tokens": 2, "bad_words": ["x"],
    "allowed_token_ids": [1, 2], "stop_token_ids": [3], "truncate_prompt_tokens": 9,
    "return_token_ids": True, "thinking_token_budget": 11, "logprob_token_ids": [4, 5],
}  # fmt: skip
PATTERN = {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3}
PARAMS = pb.GenerationParams(
    **SAMPLING,
    logit_bias={5: 1.5},
    include_stop_in_output=True,
    show_special_tokens=True,
    truncation_side=pb.TRUNCATION_SIDE_RIGHT,
    num_logprobs=3,
    num_prompt_logprobs=2,
    repetition_detection=pb.RepetitionDetection(**PATTERN),
    structured_output=pb.StructuredOutput(json_schema=SCHEMA, disable_any_whitespace=True),
)
HTTP: dict[str, Any] = {
    **SAMPLING,
    "logit_bias": {"5": 1.5},
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "truncation_side": "right",
    "prompt_logprobs": 2,
    "repetition_detection": PATTERN,
    "structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True},
}
ROUTE: dict[str, Any] = {
    "model": "m", "n": 2, "scenario": "s", "chat_id": "c", "cache_salt": "salt"
}  # fmt: skip


def test_the_example_sets_every_parameter() -> None:
    assert {field.name for field, _ in PARAMS.ListFields()} == fields(pb.GenerationParams)


def test_a_completion_equals_that_over_http() -> None:
    request = pb.GenerateRequest(
        text="abc", params=PARAMS, echo=True, add_special_tokens=False, **ROUTE
    )
    body = {**HTTP, **ROUTE, "prompt": "abc", "logprobs": 3, "echo": True}
    body["add_special_tokens"] = False
    assert completion_of(request)[0] == parse_completion(json.dumps(body).encode())


def test_prompts_equal_those_over_http() -> None:
    ids = pb.Prompt(token_ids=pb.TokenIds(ids=[3]))
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]), further_prompts=[ids])
    assert completion_of(request)[0].prompt == [[1, 2], [3]]
    request = pb.GenerateRequest(text="a", further_prompts=[pb.Prompt(text="b")])
    assert completion_of(request)[0].prompt == ["a", "b"]


def test_a_chat_equals_that_over_http() -> None:
    """The prompt shows the schema, so its keys must stay in order, and 1.0 must not become 1."""
    request = pb.ChatRequest(
        messages=[
            pb.ChatMessage(
                role="system", content_parts=[pb.ContentPart(text="p"), pb.ContentPart(text="q")]
            ),
            pb.ChatMessage(role="user", content="x", name="me"),
            pb.ChatMessage(
                role="assistant",
                reasoning="hm",
                tool_calls=[
                    pb.ToolCall(id="c1", function=pb.FunctionCall(name="weather", arguments="{}"))
                ],
            ),
            pb.ChatMessage(role="tool", content="sunny", tool_call_id="c1"),
        ],
        params=PARAMS,
        tools=[
            pb.Tool(
                function=pb.FunctionDefinition(
                    name="weather", description="d", parameters=SCHEMA, strict=True
                )
            ),
            pb.Tool(function=pb.FunctionDefinition(name="time")),
        ],
        tool_choice=pb.ToolChoice(function="weather"),
        parallel_tool_calls=False,
        reasoning_effort=pb.REASONING_EFFORT_LOW,
        chat_template_kwargs='{"enable_thinking": true, "budget": 5}',
        include_reasoning=False,
        add_special_tokens=True,
        add_generation_prompt=False,
        continue_final_message=True,
        **ROUTE,
    )
    function = {"name": "weather", "description": "d", "parameters": json.loads(SCHEMA)}
    body = {
        **HTTP,
        **ROUTE,
        "logprobs": True,
        "top_logprobs": 3,
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": t} for t in "pq"]},
            {"role": "user", "content": "x", "name": "me"},
            {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALL]},
            {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
        ],
        "tools": [
            {"type": "function", "function": {**function, "strict": True}},
            {"type": "function", "function": {"name": "time"}},
        ],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": True, "budget": 5},
        "include_reasoning": False,
        "add_special_tokens": True,
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    chat, expected = chat_of(request).chat, parse_chat(json.dumps(body).encode())
    assert chat == expected
    assert msgspec.json.encode(chat.tools) == msgspec.json.encode(expected.tools)
    check_chat(chat)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (pb.TOOL_CHOICE_MODE_UNSPECIFIED, "auto"),
        (pb.TOOL_CHOICE_MODE_AUTO, "auto"),
        (pb.TOOL_CHOICE_MODE_NONE, "none"),
        (pb.TOOL_CHOICE_MODE_REQUIRED, "required"),
    ],
)
def test_each_mode_becomes_a_tool_choice(mode: Any, expected: str) -> None:
    request = pb.ChatRequest(messages=[USER], tool_choice=pb.ToolChoice(mode=mode))
    assert chat_of(request).chat.tool_choice == expected


def test_every_reasoning_effort_has_its_openai_name() -> None:
    for name, value in pb.ReasoningEffort.items():
        word = name.removeprefix("REASONING_EFFORT_").lower()
        chat = chat_of(pb.ChatRequest(messages=[USER], reasoning_effort=value)).chat
        assert chat.reasoning_effort == (word if value else None)


def test_tokenize_equals_that_over_http() -> None:
    tools = [pb.Tool(function=pb.FunctionDefinition(name="f", parameters=SCHEMA))]
    request = pb.TokenizeRequest(
        model="m",
        messages=[USER],
        tools=tools,
        chat_template_kwargs='{"a": 1}',
        add_special_tokens=True,
        add_generation_prompt=False,
        continue_final_message=True,
        return_token_strs=True,
    )
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"function": {"name": "f", "parameters": json.loads(SCHEMA)}}],
        "chat_template_kwargs": {"a": 1},
        "add_special_tokens": True,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "return_token_strs": True,
    }
    assert tokenize_of(request)[0] == parse_tokenize(json.dumps(body).encode())
    assert tokenize_of(pb.TokenizeRequest(text=""))[0].prompt == ""


def tool(parameters: str, name: str = "f") -> pb.Tool:
    return pb.Tool(function=pb.FunctionDefinition(name=name, parameters=parameters))


def call(**fields: Any) -> pb.ChatMessage:
    function = pb.FunctionCall(name="f", arguments="{}")
    given = pb.ToolCall(**{"id": "c", "function": function, **fields})
    return pb.ChatMessage(role="assistant", tool_calls=[given])


_PARAMETERS = "tools[0].function.parameters"
_CALLS = "messages[0].tool_calls[0]"
_UNKNOWN: Any = 99  # an unknown number of an enum
_TOO_MANY = json.dumps({"x" * 10: [{}] * 40_000})


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [pb.ChatMessage(role="function")]}, "messages[0].role"),
        ({"messages": [pb.ChatMessage(role="user", content="x", content_parts=[pb.ContentPart()])]},
            "messages[0].content_parts"),
        ({"messages": [pb.ChatMessage(role="user", content_parts=[pb.ContentPart()])]},
            "messages[0].content_parts[0].text"),
        ({"messages": [pb.ChatMessage(role="user", content_parts=[pb.ContentPart(text="\0")])]},
            "messages[0].content_parts[0].text"),
        ({"messages": [pb.ChatMessage(role="user", name="a\0")]}, "messages[0].name"),
        ({"messages": [pb.ChatMessage(role="tool", content="x")]}, "messages[0].tool_call_id"),
        ({"messages": [pb.ChatMessage(role="tool", tool_call_id="c")]},
            "messages[0].tool_call_id"),
        ({"messages": [call(id="")]}, f"{_CALLS}.id"),
        ({"messages": [call(id="\0")]}, f"{_CALLS}.id"),
        ({"messages": [call(function=None)]}, f"{_CALLS}.function"),
        ({"messages": [call(function=pb.FunctionCall())]}, f"{_CALLS}.function.name"),
        ({"messages": [call(function=pb.FunctionCall(name="f", arguments="\0"))]},
            f"{_CALLS}.function.arguments"),
        ({"messages": [pb.ChatMessage(role="user", tool_calls=[pb.ToolCall()])]},
            "messages[0].tool_calls"),
        ({"tools": [pb.Tool()]}, "tools[0].function"),
        ({"tools": [tool("{}", name="")]}, "tools[0].function.name"),
        ({"tools": [tool("{}"), tool("{}")]}, "tools[1].function.name"),
        ({"tools": [tool("{}", name=f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": [tool("")]}, _PARAMETERS),
        ({"tools": [tool("[]")]}, _PARAMETERS),
        ({"tools": [tool("{}, {}")]}, _PARAMETERS),
        ({"tools": [tool('{"a": 1, "a": 2}')]}, f"{_PARAMETERS}.a"),
        ({"tools": [tool('{"a": "\\u0000"}')]}, f"{_PARAMETERS}.a"),
        ({"tools": [tool('{"a":' * 70 + "1" + "}" * 70)]}, _PARAMETERS),
        ({"tools": [tool('{"a":' * 100_000)]}, _PARAMETERS),
        ({"tools": [tool(_TOO_MANY)]}, _PARAMETERS),
        ({"tools": [tool('{"a": "'), tool(_TOO_MANY, name="g")]}, "tools[1].function.parameters"),
        ({"tool_choice": pb.ToolChoice(function="g")}, "tool_choice.function"),
        ({"tool_choice": pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED)}, "tool_choice"),
        ({"tool_choice": pb.ToolChoice(mode=_UNKNOWN)}, "tool_choice.mode"),
        ({"reasoning_effort": _UNKNOWN}, "reasoning_effort"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"params": pb.GenerationParams(num_logprobs=21)}, "num_logprobs"),
        ({"params": pb.GenerationParams(num_prompt_logprobs=21)}, "num_prompt_logprobs"),
        ({"params": pb.GenerationParams(truncation_side=_UNKNOWN)}, "truncation_side"),
        ({"params": pb.GenerationParams(structured_output=pb.StructuredOutput())},
            "structured_output"),
        ({"params": pb.GenerationParams(structured_output=pb.StructuredOutput(json_object=False))},
            "structured_output.json_object"),
    ],
)  # fmt: skip
def test_an_error_names_the_field_as_grpc_calls_it(asked: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked(pb.ChatRequest(**{"messages": [USER], **asked}))
    assert caught.value.field == field
    assert len(caught.value.message) < 400


def checked(request: pb.ChatRequest) -> None:
    translated = chat_of(request)
    with translated.naming():
        check_chat(translated.chat)


def test_the_refusal_of_a_prompt_names_its_field() -> None:
    wrong = {
        "prompt": pb.GenerateRequest(),
        "text": pb.GenerateRequest(text="\0"),
        "further_prompts[0].text": pb.GenerateRequest(
            text="a", further_prompts=[pb.Prompt(text="\0")]
        ),
        "further_prompts[1]": pb.GenerateRequest(
            text="a", further_prompts=[pb.Prompt(text="b"), pb.Prompt()]
        ),
    }
    for field, request in wrong.items():
        with pytest.raises(InvalidRequest) as caught:
            completion_of(request)
        assert caught.value.field == field


def test_tokenize_needs_either_text_or_messages() -> None:
    for request in (pb.TokenizeRequest(), pb.TokenizeRequest(text="a", messages=[USER])):
        asked, names = tokenize_of(request)
        with pytest.raises(InvalidRequest) as caught, naming(names):
            parse_tokenize(msgspec.json.encode(asked))
        assert caught.value.field == "text"
