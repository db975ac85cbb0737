"""Tool calls and results in a conversation: which are refused, and what the chat template gets."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.openai.chat_messages import messages_of
from pdmesh.services.gateway.openai.schema import parse_chat
from tests.support.cost import cost_ratio

USER = {"role": "user", "content": "hi"}


def call(arguments: str = '{"a": 1}', **fields: Any) -> dict[str, Any]:
    given = {"id": "c1", "type": "function", **fields}
    return {"function": {"name": "f", "arguments": arguments}, **given}


def asked(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def result(**fields: Any) -> dict[str, Any]:
    return {"role": "tool", "content": "42", "tool_call_id": "c1", **fields}


def body_of(*messages: dict[str, Any]) -> bytes:
    return json.dumps({"model": "m", "messages": [USER, *messages]}).encode()


def rendered(*messages: dict[str, Any]) -> list[Any]:
    return list(messages_of(parse_chat(body_of(*messages)).messages))[1:]


def test_a_template_gets_arguments_as_objects_and_results_as_they_are() -> None:
    assert rendered(
        asked(call(index=0)), result(name="f", content=[{"type": "text", "text": "x"}])
    ) == [
        {
            "role": "assistant",
            "content": (),
            "tool_calls": [
                {"id": "c1", "function": {"arguments": {"a": 1}, "name": "f"}, "type": "function"}
            ],
        },
        {"role": "tool", "content": ["x"], "tool_call_id": "c1", "name": "f"},
    ]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (r'{"a": "x\ud800y", "n": 1.0}', {"a": "x\ufffdy", "n": 1.0}),
        (r'{"\udC00": ["\uD800"]}', {"\ufffd": ["\ufffd"]}),
        (r'{"a": "\ud83c\udf27"}', {"a": "\U0001f327"}),
    ],
)
def test_halves_of_characters_in_arguments_become_replacement_characters(
    arguments: str, shown: dict[str, Any]
) -> None:
    """A model may write half of a character, which no tokenizer accepts. The conversation must
    still continue.
    """
    found = rendered(asked(call(arguments)))[0]["tool_calls"][0]["function"]["arguments"]
    assert found == shown
    assert json.dumps(found, ensure_ascii=False).encode()


@pytest.mark.parametrize("arguments", ["", "{", "[1]", "7", "not json", "null", '{"a": 1'])
def test_arguments_that_are_not_an_object_become_an_empty_object(arguments: str) -> None:
    """The model wrote these arguments. As in plain vLLM, the conversation must continue."""
    assert rendered(asked(call(arguments)))[0]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_reaches_the_template_under_both_names(name: str) -> None:
    (found,) = rendered({"role": "assistant", "content": "x", name: "hm"})
    assert (found["reasoning"], found["reasoning_content"]) == ("hm", "hm")


def test_an_agents_billing_line_is_left_out_of_the_prompt() -> None:
    line = "x-anthropic-billing-header: cch=1;"
    (found,) = rendered({"role": "system", "content": f"{line}\nBe kind."})
    assert found["content"] == ["Be kind."]
    parts = [{"type": "text", "text": line}, {"type": "text", "text": "Be kind."}]
    (found,) = rendered({"role": "system", "content": parts})
    assert found["content"] == ["Be kind."]


@pytest.mark.fault("F31")
@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([result()], "messages[1].tool_call_id"),
        ([asked(call()), result(tool_call_id="c2")], "messages[2].tool_call_id"),
        ([result(), asked(call())], "messages[1].tool_call_id"),
        ([asked(call()), result(tool_call_id=None)], "messages[2].tool_call_id"),
        ([asked(call()), result(content=None)], "messages[2].content"),
        ([asked(call(id=""))], "messages[1].tool_calls[0].id"),
        ([asked(call(id="x" * 257))], "messages[1].tool_calls[0].id"),
        ([asked(call(), call(type="custom", custom={}))], "messages[1].tool_calls[1].type"),
        ([asked({"id": "c1"})], "messages[1].tool_calls[0].function"),
        ([asked({"id": "c1", "function": {"name": ""}})],
            "messages[1].tool_calls[0].function.name"),
        ([asked({"id": "c1", "function": {}})], "messages[1].tool_calls[0].function.name"),
        ([asked(*[call()] * 129)], "messages[1].tool_calls"),
        ([{**USER, "tool_calls": [call()]}], "messages[1].tool_calls"),
        ([{"role": "developer", "content": "x", "tools": [1]}], "messages[1].tools"),
    ],
)  # fmt: skip
def test_the_refusal_of_a_bad_call_or_result_names_its_field(
    messages: list[dict[str, Any]], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(body_of(*messages))
    assert caught.value.field == field


@pytest.mark.fault("F31", "F32")
@pytest.mark.parametrize(
    "arguments", ['{"a": "\\u0000"}', '{"a": ' + "[" * 9999 + "]" * 9999 + "}"]
)
def test_the_refusal_of_harmful_arguments_names_their_field(arguments: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        rendered(asked(call(arguments)))
    assert caught.value.field == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.fault("F31")
def test_arguments_hold_a_bounded_number_of_values() -> None:
    """JSON inside of JSON is parsed as well, where many small values cost as much."""
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(body_of(asked(*[call('{"a": [' + "{}," * 3000 + "1]}")] * 20)))
    assert caught.value.field == "messages"
    text = json.dumps({"text": 'a, [b], {"c": "d"}, ' * 20_000})
    assert rendered(asked(call(text)))[0]["tool_calls"][0]["function"]["arguments"]


@pytest.mark.fault("F31")
def test_the_largest_arguments_cost_little_more_than_text_of_the_same_length() -> None:
    hostile = '{"a": "' + '\\"' * 400_000 + '", "b": [' + "[]," * 16_000 + "1]}"
    honest = json.dumps({"a": "word, " * (len(hostile) // 6)})
    bodies = [body_of(asked(call(text))) for text in (hostile, honest)]

    def taken(body: bytes) -> None:
        messages_of(parse_chat(body).messages)

    assert cost_ratio(partial(taken, bodies[0]), partial(taken, bodies[1])) < 50
