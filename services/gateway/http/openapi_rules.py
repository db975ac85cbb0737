"""Rules for requests that `/openapi.json` states in addition to the types and bounds of fields.

Each rule belongs to one struct, and describes the checks that the types of the struct's fields
cannot express. Most of these checks concern fields that depend on each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pdmesh.services.gateway.http.pooling.schema import SCORED, ScoreRequest
from pdmesh.services.gateway.openai.chat_messages import (
    CalledFunction,
    ChatMessage,
    ContentPart,
    ToolCall,
)
from pdmesh.services.gateway.openai.schema import TokenizeRequest
from pdmesh.services.gateway.openai.tools import FunctionDefinition, Tool

# A JSON schema, with values of any type.
Json = dict[str, Any]

_NO_NUL: Final = "^[^\\u0000]*$"
_SOME: Final = {"not": {"type": "null"}}
_NONE_OR_EMPTY: Final[Json] = {"enum": [None, []]}


def _where_role_is(roles: list[str], then: Json) -> Json:
    return {"if": {"properties": {"role": {"enum": roles}}, "required": ["role"]}, "then": then}


_MESSAGE: Final[Json] = {
    "allOf": [
        _where_role_is(
            ["system", "developer", "user", "tool"],
            {
                "required": ["content"],
                "properties": {"content": _SOME, "tool_calls": _NONE_OR_EMPTY},
            },
        ),
        _where_role_is(
            ["tool"],
            {
                "required": ["tool_call_id"],
                "properties": {"tool_call_id": {"type": "string", "minLength": 1}},
            },
        ),
    ]
}
_FUNCTION: Final[Json] = {
    "required": ["function"],
    "properties": {"type": {"const": "function"}, "function": _SOME},
}
_NAMED: Final[Json] = {"properties": {"name": {"minLength": 1, "maxLength": 256}}}
_SCORED_FIELDS: Final = sorted({name for pair in SCORED for name in pair})
RULES: Final[Mapping[type[msgspec.Struct], Json]] = {
    ChatMessage: _MESSAGE,
    ContentPart: {
        "allOf": [{"required": ["text"], "properties": {"type": {"const": "text"}, "text": _SOME}}]
    },
    Tool: {"allOf": [_FUNCTION]},
    FunctionDefinition: {"allOf": [_NAMED]},
    CalledFunction: {"allOf": [_NAMED]},
    ToolCall: {
        "allOf": [
            _FUNCTION,
            {"required": ["id"], "properties": {"id": {"minLength": 1, "maxLength": 256}}},
        ]
    },
    ScoreRequest: {
        "oneOf": [
            {
                "required": [*pair],
                "properties": {
                    name: _SOME if name in pair else {"type": "null"} for name in _SCORED_FIELDS
                },
            }
            for pair in SCORED
        ]
    },
    TokenizeRequest: {
        "oneOf": [
            {"required": [name], "properties": {name: _SOME, other: {"type": "null"}}}
            for name, other in (("prompt", "messages"), ("messages", "prompt"))
        ]
    },
}


def without_nul(schema: object) -> None:
    """Add a pattern that excludes U+0000 to the strings of a schema, except those with an enum."""
    if isinstance(schema, list):
        for each in schema:
            without_nul(each)
    elif isinstance(schema, dict):
        if schema.get("type") == "string" and "enum" not in schema:
            schema.setdefault("pattern", _NO_NUL)
        for each in schema.values():
            without_nul(each)
