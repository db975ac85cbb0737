"""A request to the Messages API becomes the same chat as in plain vLLM."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.access.errors import NoApiKey
from pdmesh.services.gateway.http.messages.errors import error_body
from pdmesh.services.gateway.http.messages.schema import parse_count_tokens, parse_messages
from pdmesh.services.gateway.http.messages.translation import chat_of
from pdmesh.services.gateway.openai.chat_messages import messages_of
from pdmesh.services.gateway.openai.schema import check_chat
from pdmesh.services.gateway.openai.translated import TranslatedChat

CALL = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": [1, {"x": "é"}]}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "seen"}
TOOL = {"name": "look", "description": "d", "input_schema": {"properties": {"at": {}}}}


def translated(*, merges_system: bool = False, **fields: Any) -> TranslatedChat:
    body = {"model": "m", "max_tokens": 5, "messages": [user("hi")], **fields}
    request = parse_messages(json.dumps(body).encode())
    return chat_of(request, merges_system=merges_system)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": blocks}


def text(of: str) -> dict[str, Any]:
    return {"type": "text", "text": of}


def conversation(*messages: Any, **fields: Any) -> list[Any]:
    return messages_of(translated(messages=messages, **fields).chat.messages)


def test_results_of_tools_come_before_the_users_text() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    found = conversation(
        user([text("a"), text(""), text("b")]),
        said(thought, {"type": "redacted_thinking", "data": "x"}, text("wait"), CALL),
        user([text("and"), RESULT]),
    )
    function = {"name": "look", "arguments": {"at": [1, {"x": "é"}]}}
    assert found == [
        {"role": "user", "content": ["a", "b"]},
        {
            "role": "assistant",
            "content": "wait",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
            "reasoning": "hm",
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "seen", "tool_call_id": "toolu_1"},
        {"role": "user", "content": "and"},
    ]


def test_a_result_may_be_blocks_or_nothing() -> None:
    blocks = RESULT | {"content": [text("a"), text("b")]}
    nothing = {"type": "tool_result", "tool_use_id": "toolu_1"}
    found = conversation(user("x"), said(CALL), user([blocks, nothing]))
    assert [m["content"] for m in found[2:]] == ["a\nb", ""]


def test_the_system_prompt_is_one_text_without_the_billing_line() -> None:
    system = [text("x-anthropic-billing-header: 1"), text("a"), text("b")]
    assert conversation(user("x"), system=system)[0] == {"role": "system", "content": "ab"}
    assert [m["role"] for m in conversation(user("x"), system="")] == ["user"]


@pytest.mark.parametrize("merges", [False, True])
def test_a_later_system_message_may_become_part_of_the_first(merges: bool) -> None:
    messages = [user("x"), {"role": "system", "content": [text("later")]}, user("y")]
    chat = translated(messages=messages, system="first", merges_system=merges)
    found = [(m["role"], m["content"]) for m in messages_of(chat.chat.messages)]
    later = [] if merges else [("system", "later")]
    first = "firstlater" if merges else "first"
    assert found == [("system", first), ("user", "x"), *later, ("user", "y")]


def test_tools_and_the_tool_choice_are_translated() -> None:
    choice = {"type": "tool", "name": "look", "disable_parallel_tool_use": True}
    chat = translated(tools=[TOOL], tool_choice=choice).chat
    check_chat(chat)
    assert msgspec.to_builtins(chat.tools) == [
        {
            "type": "function",
            "function": {
                "name": "look",
                "description": "d",
                "parameters": {"properties": {"at": {}}, "type": "object"},
                "strict": None,
            },
        }
    ]
    assert msgspec.to_builtins(chat.tool_choice) == {
        "type": "function", "function": {"name": "look"}
    }  # fmt: skip
    assert chat.parallel_tool_calls is False
    for given, expected in (("any", "required"), ("auto", "auto"), ("none", "none")):
        assert translated(tools=[TOOL], tool_choice={"type": given}).chat.tool_choice == expected


def test_thinking_and_output_settings_are_translated() -> None:
    effort = {"effort": "low"}
    assert translated(output_config=effort).chat.reasoning_effort == "low"
    off = translated(output_config=effort, thinking={"type": "disabled"}).chat
    assert off.reasoning_effort == "none"
    enabled = {"type": "enabled", "budget_tokens": 1024}
    on = translated(thinking=enabled, max_tokens=1025).chat
    assert on.thinking_token_budget == 1024
    schema = {"type": "object"}
    found = translated(output_config={"format": {"type": "json_schema", "schema": schema}}).chat
    assert found.response_format is not None
    assert found.response_format.json_schema is not None
    assert found.response_format.json_schema.schema == schema


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": [user("x"), said(CALL), user([RESULT | {"tool_use_id": "no"}])]},
         "messages[2].content[0].tool_use_id"),
        ({"messages": [user([RESULT])]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [user([CALL])]}, "messages[0].content[0].type"),
        ({"messages": [said(text("a"), CALL | {"name": ""})]}, "messages[0].content[1].name"),
        ({"messages": [said(CALL | {"id": ""})]}, "messages[0].content[0].id"),
        ({"messages": [said(RESULT)]}, "messages[0].content[0].type"),
        ({"messages": [user([text("x")] * 300)]}, "messages[0].content"),
        ({"system": "s", "messages": [user("x"), user([text("x")] * 300)]}, "messages[1].content"),
        ({"messages": []}, "messages"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL | {"name": ""}]}, "tools[0].name"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "web", "type": "web_search_20250305"}]}, "tools[0].type"),
        ({"tools": [TOOL] * 1000}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"output_config": {"format": {"type": "grammar"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"watermarking": True}, "watermarking"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
        ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_errors_name_the_fields_of_the_messages_api(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:  # noqa: PT012 - all of it may refuse
        chat = translated(**fields)
        with chat.naming():
            check_chat(chat.chat)
    assert caught.value.field == field


def test_the_extensions_of_vllm_have_their_effect_or_are_neutral() -> None:
    variables = {"enable_thinking": False}
    found = translated(chat_template_kwargs=variables, watermarking=False, vllm_xargs={}).chat
    assert found.chat_template_kwargs == variables
    counted = parse_count_tokens(
        json.dumps(
            {"model": "m", "messages": [user("x")], "chat_template_kwargs": variables}
        ).encode()
    )
    assert chat_of(counted).chat.chat_template_kwargs == variables


def test_the_refusal_of_a_deeply_nested_schema_names_its_field() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"properties": {"x": deep}}
    chat = translated(tools=[TOOL | {"input_schema": deep}])
    with pytest.raises(InvalidRequest) as caught, chat.naming():
        check_chat(chat.chat)
    assert caught.value.field == "tools[0].input_schema"
    assert "tools[0].input_schema" in caught.value.message


def test_an_error_message_names_its_field_only_once() -> None:
    image = {"type": "image", "source": {"type": "file"}}
    results = [{"type": "tool_result", "tool_use_id": "a", "content": [image]}]
    for content, field, says in (
        ([image], "messages[0].content[0].source.type", "the source of an image is base64 or url"),
        (results, "messages[0].content[0].content[0].type", "blocks of type image"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            translated(messages=[{"role": "user", "content": content}])
        told = json.loads(error_body(caught.value))["error"]["message"]
        assert told.startswith(f"{field}: {says}")
        assert told.count("messages[0]") == 1


def test_the_refusal_without_a_key_names_both_headers() -> None:
    told = json.loads(error_body(NoApiKey("Authorization: Bearer <key>")))["error"]
    assert told["type"] == "authentication_error"
    assert "Authorization" in told["message"]
    assert "x-api-key" in told["message"]


@pytest.mark.parametrize(
    ("source", "field", "says"),
    [
        ({"type": "url", "url": 4}, "source.url", "str"),
        ({"type": "base64", "data": 4}, "source.data", "str"),
        ({"type": "url"}, "source.url", "missing"),
        ([1], "source", "object"),
        ({"type": "file"}, "source.type", "base64 or url"),
        ({}, "source.type", "missing"),
        ({"type": "base64", "data": "AA==", "url": "http://a"}, "source.url", "has data"),
        ({"type": "url", "url": "http://a", "data": "AA=="}, "source.data", "has url"),
        ({"type": "url", "url": "http://a", "media_type": "image/png"}, "source.media_type", "has"),
        ({"type": "base64", "data": "AA==", "media_type": "text/html"}, "source.media_type",
            "image/png"),
    ],
)  # fmt: skip
def test_a_wrong_source_of_an_image_is_named(source: Any, field: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        conversation(user([{"type": "image", "source": source}]))
    assert refused.value.field == f"messages[0].content[0].{field}"


@pytest.mark.parametrize(
    ("block", "field"),
    [
        (text("a") | {"source": {"type": "base64", "data": "AA=="}}, "source"),
        (text("a") | {"content": "b"}, "content"),
        ({"type": "image", "source": {"type": "url", "url": "http://a"}, "text": "b"}, "text"),
    ],
)
def test_a_block_has_no_content_that_would_be_left_out(block: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        conversation(user([block]))
    assert refused.value.field == f"messages[0].content[0].{field}"
    assert refused.value.field in refused.value.message


def test_unknown_fields_of_a_source_are_named() -> None:
    source = {"type": "base64", "data": "AA==", "size": 1}
    body = {
        "model": "m",
        "max_tokens": 5,
        "messages": [user([{"type": "image", "source": source}])],
    }
    ignored: list[str] = []
    assert chat_of(parse_messages(json.dumps(body).encode(), ignored)).chat.messages
    assert ignored == ["messages[0].content[0].source.size"]
    with pytest.raises(InvalidRequest) as refused:
        parse_messages(json.dumps(body).encode())
    assert (refused.value.field, refused.value.reason) == (ignored[0], "UNKNOWN_FIELD")
