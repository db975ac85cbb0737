"""The items of a request to the Responses API become the same messages as in plain vLLM."""

from __future__ import annotations

import json
import os
from typing import Any

import msgspec
import pytest

from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.http.responses.kept import KeptResponse, input_items, items_of
from pdmesh.services.gateway.http.responses.schema import parse_responses
from pdmesh.services.gateway.http.responses.translation import chat_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")

USER = {"role": "user", "content": "x"}
SAID = {
    "type": "message", "role": "assistant", "id": "m1", "status": "completed",
    "content": [{"type": "output_text", "text": "y", "annotations": []}],
}  # fmt: skip
THOUGHT = {
    "type": "reasoning", "id": "r1", "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}  # fmt: skip
SUMMED = {"type": "reasoning", "id": "r1", "summary": [{"type": "summary_text", "text": "hm"}]}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'}
OTHER = CALL | {"call_id": "c2"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "seen"}
INPUTS: list[Any] = [
    "hello",
    [USER],
    [USER, {"role": "assistant", "content": "y"}, USER],
    [{"role": "developer", "content": "d"}, USER],
    [USER, SAID, USER],
    [USER, THOUGHT, SAID, USER],
    [USER, SUMMED, SAID, USER],
    [USER, THOUGHT, CALL, RESULT],
    [USER, CALL, OTHER, RESULT, RESULT | {"call_id": "c2"}, USER],
    [USER, THOUGHT, SAID, CALL, RESULT, THOUGHT, SAID, USER],
    [USER, SAID, THOUGHT, CALL, RESULT],
    [USER, CALL, SAID],
]


def chat(asked: Any, **fields: Any) -> list[Any]:
    body = {"model": "m", "input": asked, **fields}
    return list(chat_of(parse_responses(json.dumps(body).encode())).chat.messages)


def plain(message: Any) -> dict[str, Any]:
    """The contents of a message in one form, however its parts were given."""
    found = msgspec.to_builtins(message) if isinstance(message, msgspec.Struct) else dict(message)
    calls = [
        (c["id"], c["function"]["name"], c["function"]["arguments"])
        for c in found.get("tool_calls") or ()
    ]
    return {
        "role": found["role"],
        "content": found.get("content") or "",
        "calls": calls,
        "reasoning": found.get("reasoning"),
        "tool_call_id": found.get("tool_call_id"),
    }


@pytest.mark.filterwarnings("ignore")  # importing vLLM raises warnings
@pytest.mark.parametrize("instructions", [None, "brief"])
@pytest.mark.parametrize("asked", INPUTS)
def test_the_chat_is_that_of_vllm(asked: Any, instructions: str | None) -> None:
    pytest.importorskip("vllm")
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.utils import construct_input_messages

    theirs = construct_input_messages(
        request_instructions=instructions,
        request_input=ResponsesRequest(model="m", input=asked).input,
    )
    ours = chat(asked, instructions=instructions)
    assert list(map(plain, ours)) == list(map(plain, theirs))


@pytest.mark.parametrize("asked", INPUTS)
def test_the_kept_input_is_the_same_conversation(asked: Any) -> None:
    request = parse_responses(json.dumps({"model": "m", "input": asked}).encode())
    kept = msgspec.json.decode(msgspec.json.encode(input_items(request.input)))
    assert all(item["id"] and item["type"] for item in kept)
    assert list(map(plain, chat(kept))) == list(map(plain, chat(asked)))


def test_a_chain_of_responses_drops_what_later_responses_do_not_read() -> None:
    part = {"type": "output_text", "text": "y", "annotations": [{}] * 9000, "logprobs": [1] * 9000}
    body = {"model": "m", "input": [USER, SAID | {"content": [part]}]}
    items = input_items(parse_responses(json.dumps(body).encode()).input)
    output = [{**SAID, "content": [part]}]
    kept = KeptResponse(
        msgspec.Raw(b"{}"),
        [msgspec.Raw(msgspec.json.encode(item)) for item in items],
        [msgspec.Raw(msgspec.json.encode(item)) for item in output],
    )
    for carried in (items, items_of(kept)):
        assert len(msgspec.json.encode(carried)) < 1000
        assert "y" in msgspec.json.encode(carried).decode()


def test_structured_outputs_of_vllm_are_passed_to_the_chat() -> None:
    body = {"model": "m", "input": "x", "structured_outputs": {"regex": "a+"}}
    found = chat_of(parse_responses(json.dumps(body).encode())).chat
    assert found.structured_outputs is not None
    assert found.structured_outputs.regex == "a+"


def test_a_thought_may_be_plain_text() -> None:
    written = {"type": "reasoning", "content": "hm"}
    assert list(map(plain, chat([USER, written, SAID]))) == list(
        map(plain, chat([USER, THOUGHT, SAID]))
    )


def test_several_parts_stay_several() -> None:
    parts = [{"type": "input_text", "text": t} for t in "ab"]
    (message,) = chat([{"role": "user", "content": parts}])
    assert [part.text for part in message.content] == ["a", "b"]


def test_the_text_format_and_the_tools_become_those_of_a_chat() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    body = {
        "model": "m", "input": "x", "text": {"format": form}, "tools": [tool],
        "tool_choice": {"type": "function", "name": "look"}, "reasoning": {"effort": "low"},
    }  # fmt: skip
    found = chat_of(parse_responses(json.dumps(body).encode())).chat
    assert found.reasoning_effort == "low"
    asked: Any = msgspec.to_builtins(found.response_format)
    assert (asked["type"], asked["json_schema"]["schema"]) == ("json_schema", {"type": "object"})
    assert msgspec.to_builtins(found.tool_choice) == {
        "type": "function", "function": {"name": "look"}
    }  # fmt: skip
    assert found.tools is not None
    assert found.tools[0].function is not None
    assert found.tools[0].function.name == "look"


@pytest.mark.parametrize(
    ("part", "error"), [({"type": "input_image"}, "type"), ({"type": "summary_text"}, "text")]
)
@pytest.mark.parametrize("name", ["summary", "content"])
def test_the_refusal_of_a_part_of_a_thought_names_its_index(
    name: str, part: dict[str, str], error: str
) -> None:
    parts = [{"type": "summary_text", "text": "a"}, part]
    with pytest.raises(InvalidRequest) as caught:
        chat([USER, {"type": "reasoning", name: parts}])
    assert caught.value.field == f"input[1].{name}[1].{error}"
    assert caught.value.field in caught.value.message


@pytest.mark.parametrize("wrong", [1, 1.5, None, True, [], {}])
def test_the_refusal_of_metadata_names_its_key(wrong: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat("x", metadata={"a": "b", "c": wrong, "d": wrong})
    assert caught.value.field == "metadata.c"
    assert caught.value.message.startswith("metadata.c: expected `str`")


def test_reasoning_is_left_out_if_the_client_asks_for_that() -> None:
    body = {"model": "m", "input": "x", "include_reasoning": False}
    assert chat_of(parse_responses(json.dumps(body).encode())).chat.include_reasoning is False


@pytest.mark.parametrize(
    ("field", "value", "neutral"),
    [
        ("priority", 1, 0),
        ("watermarking", True, False),
        ("kv_transfer_params", {"a": 1}, {}),
        ("vllm_xargs", {"a": 1}, {}),
        ("previous_input_messages", [{}], []),
        ("enable_response_messages", True, False),
        ("conversation", "c", None),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused(
    field: str, value: Any, neutral: Any
) -> None:
    chat("x", **{field: neutral})
    with pytest.raises(InvalidRequest) as caught:
        chat("x", **{field: value})
    assert (caught.value.field, caught.value.reason) == (field, "UNSUPPORTED_FIELD")


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "input_text", "text": "a", "image_url": "data:"}, "image_url"),
        ({"type": "input_text", "text": "a", "file_id": "file-1"}, "file_id"),
        ({"type": "input_image", "image_url": "data:", "text": "a"}, "text"),
        ({"type": "input_image", "image_url": "data:", "file_id": "file-1"}, "file_id"),
        ({"type": "input_image", "image_url": "data:", "detail": "huge"}, "detail"),
    ],
)
def test_a_part_has_no_content_that_would_be_left_out(part: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat([{"role": "user", "content": [part]}])
    assert caught.value.field == f"input[0].content[0].{field}"
    assert caught.value.field in caught.value.message
