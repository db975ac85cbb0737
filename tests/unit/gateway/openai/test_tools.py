"""Tools that cannot be offered to a model are refused, and the error names the field.

All others reach the chat template.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.openai.calls import template_variables
from pdmesh.services.gateway.openai.schema import parse_chat, parse_tokenize
from pdmesh.services.gateway.openai.tools import tools_of
from tests.support.cost import cost_ratio


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"properties": schema}
    return schema


def body_of(**fields: Any) -> bytes:
    messages = [{"role": "user", "content": "hi"}]
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


@pytest.mark.fault("F31")
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [tool(f"f{i}") for i in range(1000)]}, "tools"),
        ({"tools": [tool(), tool("g"), tool()]}, "tools[2].function.name"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("x" * 257)]}, "tools[0].function.name"),
        *(({"tools": [tool(name)]}, "tools[0].function.name")
          for name in ('a"b', "a\\b", "a\nb", "</tool_call>", "a>b", "\x7f")),
        ({"tools": [tool(parameters=nested(65))]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"function": {}}]}, "tools[0].function.name"),
        ({"tools": {}}, "tools"),
        ({"tools": [tool()], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"function": {"name": "g"}}}, "tool_choice.function.name"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"chat_template_kwargs": {"a": nested(64)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_the_refusal_of_a_bad_tool_names_its_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(body_of(**fields))
    assert caught.value.field == field
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    "choice", [None, "auto", "none", "required", {"type": "function", "function": {"name": "f"}}]
)
def test_each_tool_choice_is_accepted(choice: object) -> None:
    request = parse_chat(body_of(tools=[tool(parameters=nested(64))], tool_choice=choice))
    assert tools_of(request.tools) == [
        {
            "type": "function",
            "function": {"name": "f", "description": None, "parameters": nested(64)},
        }
    ]


def test_an_empty_list_of_tools_counts_as_none() -> None:
    assert tools_of(parse_chat(body_of(tools=[], tool_choice="auto")).tools) is None


def test_an_unknown_field_of_a_tool_is_ignored_and_named_by_its_path() -> None:
    ignored: list[str] = []
    parse_chat(body_of(tools=[tool(), tool("g", examples=[1])]), ignored)
    assert ignored == ["tools[1].function.examples"]


@pytest.mark.parametrize("name", ["messages", "tools", "tokenize", "add_generation_prompt"])
def test_a_client_may_not_set_variables_that_the_template_gets_from_the_gateway(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        template_variables({"fine": 1, name: 1})
    assert caught.value.field == f"chat_template_kwargs.{name}"


def test_an_effort_sets_thinking_unless_the_client_does() -> None:
    assert template_variables(None) == {}
    assert template_variables({}, "none") == {"reasoning_effort": "none", "enable_thinking": False}
    given = {"enable_thinking": False}
    assert template_variables(given, "high") == {**given, "reasoning_effort": "high"}


def test_tokenize_takes_tools_too() -> None:
    request = parse_tokenize(body_of(tools=[tool()]))
    assert tools_of(request.tools)
    with pytest.raises(InvalidRequest) as caught:
        parse_tokenize(body_of(tools=[tool(), tool()]))
    assert caught.value.field == "tools[1].function.name"


@pytest.mark.fault("F31")
def test_tools_that_are_refused_cost_no_more_than_tools_that_are_taken() -> None:
    """The hostile requests have a thousand tools, or schemas as wide and as deep as allowed."""
    wide = {"properties": {f"p{i}": {"type": "string"} for i in range(40)}}
    honest = body_of(tools=[tool(f"f{i}", parameters=wide) for i in range(128)])

    def refused(body: bytes) -> None:
        with pytest.raises(InvalidRequest):
            parse_chat(body)

    for hostile in (
        body_of(tools=[tool(f"f{i}", parameters=nested(10)) for i in range(1000)]),
        body_of(tools=[tool(parameters={"a": [nested(60)] * 160, "b": nested(70)})]),
        body_of(tools=[tool()] * 1000),
    ):
        assert cost_ratio(partial(refused, hostile), partial(parse_chat, honest)) < 5
