"""A conversation in Anthropic's format becomes the same messages as in plain vLLM."""

from __future__ import annotations

import json
import os
from typing import Any

import msgspec
import pytest

from pdmesh.services.gateway.http.messages.schema import parse_messages
from pdmesh.services.gateway.http.messages.translation import chat_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("ignore")  # importing vLLM raises warnings

CALL = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": [1, {"x": "é"}]}}
TOOL = {"name": "look", "description": "d", "input_schema": {"properties": {"at": {}}}}


def text(of: str) -> dict[str, Any]:
    return {"type": "text", "text": of}


def result(content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": content}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}
REQUESTS: list[dict[str, Any]] = [
    {"messages": [user("x")], "system": "s"},
    {"messages": [user([text("a"), text("b")])], "system": [text("a"), text("b")]},
    {"messages": [user("x")], "system": [text("x-anthropic-billing-header: 1"), text("a")]},
    {"messages": [user("x")], "system": "x-anthropic-billing-header: 1\nBe kind."},
    {"messages": [user("x"), {"role": "system", "content": "x-anthropic-billing-header: 1\na"}]},
    {"messages": [user("x"), said(THOUGHT, text("y")), user("z")]},
    {"messages": [user("x"), said(text("y"), CALL), user([result("r"), text("and")])]},
    {"messages": [user("x"), said(THOUGHT, CALL), user([text("and"), result([text("r")])])]},
    {"messages": [user("x"), said(CALL), user([result([text("r"), text("s")])])]},
    {"messages": [user("x"), {"role": "system", "content": [text("later")]}, user("y")]},
    {"messages": [user("x"), {"role": "system", "content": "later"}], "system": "first"},
    {"messages": [user("x")], "tools": [TOOL], "tool_choice": {"type": "any"}},
    {
        "messages": [user("x")],
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
    },
    {"messages": [user("x")], "output_config": {"effort": "high"}},
    {"messages": [user("x")], "thinking": {"type": "disabled"}},
    {"messages": [user("x")], "stop_sequences": ["a"], "temperature": 0.5, "top_k": 3},
]


def plain(message: Any) -> dict[str, Any]:
    """The contents of a message in one form, however its parts were given."""
    found = msgspec.to_builtins(message) if isinstance(message, msgspec.Struct) else dict(message)
    content = found.get("content") or ""
    if isinstance(content, list):
        content = [part["text"] for part in content]
    calls = [
        (c["id"], c["function"]["name"], json.loads(c["function"]["arguments"]))
        for c in found.get("tool_calls") or ()
    ]
    return {
        "role": found["role"],
        "content": content,
        "calls": calls,
        "reasoning": found.get("reasoning"),
        "tool_call_id": found.get("tool_call_id"),
    }


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("fields", REQUESTS)
def test_the_chat_is_that_of_vllm(fields: dict[str, Any], merges: bool) -> None:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    body = {"model": "m", "max_tokens": 5, **fields}
    ours = chat_of(parse_messages(json.dumps(body).encode()), merges_system=merges).chat
    theirs = AnthropicServingMessages.to_chat_completion_request(
        AnthropicMessagesRequest(**body), merge_inline_system=merges
    )
    assert list(map(plain, ours.messages)) == list(map(plain, theirs.messages))
    tools = [
        tool.model_dump(include={"type": ..., "function": {"name", "description", "parameters"}})
        for tool in theirs.tools or ()
    ]
    shown = msgspec.to_builtins(ours.tools or [])
    for tool in shown:
        del tool["function"]["strict"]
    assert shown == tools
    for field in ("reasoning_effort", "stop", "temperature", "top_k", "max_tokens"):
        assert getattr(ours, field) == (getattr(theirs, field) or None), field
    choice = theirs.tool_choice
    if tools:
        expected = choice if isinstance(choice, str) else choice.model_dump()
        assert msgspec.to_builtins(ours.tool_choice or "auto") == expected
