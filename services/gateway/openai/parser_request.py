"""Decides whether the answers to a chat are parsed, and makes the request that the parsers read.

The parsers are vLLM's. They split an answer into reasoning, text and tool calls. The request that
they read is small, however large the messages of the chat are.

The parsers also decide whether tool calls must follow a grammar, and which grammar
(`adjust_request`, called in `parsing/vllm_parsers.py`). This module finds the field of the chat
that requires the grammar.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from pdmesh.engine.grammars.asked_grammars import AskedGrammar, GrammarKind
from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.openai.chat_messages import ChatMessage
from pdmesh.services.gateway.openai.schema import ChatCompletionRequest
from pdmesh.services.gateway.openai.tools import NamedTool
from pdmesh.services.gateway.parsing.answer_parsing import AnswerParsers, Parsing, UnusableParsers
from pdmesh.services.gateway.request.spec import ServedModel

_MAX_WORD: Final = 64  # characters. No parser knows a longer name or value.
_USER: Final[dict[str, Any]] = {"role": "user", "content": ""}
_CALL: Final = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}


async def parsing_of(
    request: ChatCompletionRequest,
    model: ServedModel,
    parsers: AnswerParsers,
    constrained_prompt: bytes = b"",
    form_field: str = "",
) -> Parsing | None:
    """How to parse the answers, or None if they are not parsed. Raises MeshError.

    `constrained_prompt` has the prompt's tokens if the answers may have a constraint. `form_field`
    is the field that asks for a form of the answers, or empty.
    """
    found = parsers.model(model.tokenizer)
    calls_tools = may_call(request)
    if calls_tools and not found.names.tool:
        message = f"no tool parser is known for {model.name}: tools work with tool_choice none only"
        raise InvalidRequest(message, reason="UNSUPPORTED_FIELD", field="tools")
    if not found.names.reasoning and not (request.tools and found.names.tool):
        return None
    if not parsers.is_installed:
        if not calls_tools:
            return None
        message = "tools need vLLM where the gateway runs"
        raise InvalidRequest(message, reason="UNSUPPORTED_FIELD", field="tools")
    body = parser_request(request)
    try:
        prepared = await parsers.prepared(found, body, constrained_prompt)
    except UnusableParsers:
        if calls_tools:
            raise
        return None
    calls = asked_calls(prepared.constraint, request) if prepared.constraint else None
    field = calls.field if calls is not None else form_field
    if prepared.lacks_end and field:
        message = f"{field}: no token ends this model's reasoning, so no form can follow it"
        raise InvalidRequest(message, reason="UNSUPPORTED_FIELD", field=field)
    is_named = isinstance(request.tool_choice, NamedTool)
    begins_after = tuple(prepared.begins_after)
    return Parsing(parsers, found, body, prepared.are_special_shown, is_named, begins_after, calls)


def may_call(request: ChatCompletionRequest) -> bool:
    """Whether the model may or must call a tool."""
    return bool(request.tools) and request.tool_choice != "none"


def asked_calls(constraint: str, request: ChatCompletionRequest) -> AskedGrammar:
    """The grammar that vLLM's parser demands for the tool calls."""
    field = _constraining_field(request)
    found = msgspec.json.decode(constraint)
    if (schema := found.get("json")) is not None:
        text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
        return AskedGrammar(GrammarKind.JSON, text, field)
    return AskedGrammar(GrammarKind.CALLS, found["structural_tag"], field)


def parser_request(request: ChatCompletionRequest) -> bytes:
    """The request for the parsers.

    It has as many tool calls as all messages of the chat together, because some models number tool
    calls through the whole chat. The rest of the messages is left out.
    """
    return msgspec.json.encode(
        {
            "model": request.model,
            "messages": [_USER, *_calls_of(request.messages)],
            "tools": request.tools or None,
            "tool_choice": (request.tool_choice or "auto") if request.tools else "none",
            "parallel_tool_calls": request.parallel_tool_calls,
            "include_reasoning": request.include_reasoning is not False,
            "chat_template_kwargs": _variables_of(request),
            "reasoning_effort": request.reasoning_effort,
        }
    )


def _variables_of(request: ChatCompletionRequest) -> dict[str, bool | int | float | str | None]:
    """The chat template's variables in a short form. Parsers read only switches and words in them.

    A list or an object becomes true or false, as in an `if` of a template.
    """
    return {
        name: value[:_MAX_WORD] if isinstance(value, str)
        else value if value is None or isinstance(value, int | float)
        else bool(value)
        for name, value in (request.chat_template_kwargs or {}).items()
        if len(name) <= _MAX_WORD
    }  # fmt: skip


def _calls_of(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    return [
        {"role": "assistant", "content": "", "tool_calls": [_CALL] * len(message.tool_calls)}
        for message in messages
        if message.tool_calls
    ]


def _constraining_field(request: ChatCompletionRequest) -> str:
    """The field that requires tool calls to have a form."""
    if request.tool_choice in (None, "auto"):
        if request.parallel_tool_calls is False:
            return "parallel_tool_calls"
        tools = enumerate(request.tools or ())
        strict = (i for i, tool in tools if tool.function and tool.function.strict)
        return f"tools[{next(strict, 0)}].function.strict"
    return "tool_choice"
