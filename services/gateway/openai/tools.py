"""The tools that a request offers to the model, and which of them the model may call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from pdmesh.errors import InvalidRequest
from pdmesh.services.gateway.openai.unknown_fields import Nested

MAX_TOOLS: Final = 128  # as in OpenAI's API
MAX_DEPTH: Final = 64  # of a schema, or of any other value for a template
_MAX_NAME_CHARS: Final = 256
# Models write the names of functions into JSON or between angle brackets, without any escapes.
_NOT_IN_NAMES: Final = re.compile(r'["\\<>\x00-\x1f\x7f]')


class FunctionDefinition(msgspec.Struct, forbid_unknown_fields=True):
    """`parameters` is a JSON schema. With `strict`, the arguments must be valid under it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: str = "function"
    function: FunctionDefinition | None = None


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    """The choice of one tool."""

    function: FunctionName
    type: Literal["function"] = "function"


ToolChoice = Literal["none", "auto", "required"] | NamedTool

NESTED_IN_TOOLS: Final[Nested] = {
    Tool: {"function": FunctionDefinition},
    NamedTool: {"function": FunctionName},
}


def check_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> None:
    """Raises InvalidRequest with the field."""
    names: set[str] = set()
    if tools is not None and len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"at most {MAX_TOOLS} tools", field="tools")
    for index, tool in enumerate(tools or ()):
        where = f"tools[{index}]"
        if tool.type != "function":
            message = f"tools of type {tool.type[:32]} are not supported; only functions are"
            raise InvalidRequest(message, reason="UNSUPPORTED_FIELD", field=f"{where}.type")
        if tool.function is None:
            field = f"{where}.function"
            raise InvalidRequest(f"missing field: {field}", reason="MISSING_FIELD", field=field)
        _check_function(tool.function, f"{where}.function", names)
        names.add(tool.function.name)
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        message = "tool_choice names none of the tools"
        raise InvalidRequest(message, field="tool_choice.function.name")
    if choice == "required" and not names:
        raise InvalidRequest("tool_choice needs tools", field="tool_choice")


def tools_of(tools: Sequence[Tool] | None) -> list[dict[str, object]] | None:
    """The tools in the form for chat templates, or None without tools."""
    return [_tool_of(tool.function) for tool in tools if tool.function] if tools else None


def check_depth(value: object, field: str) -> None:
    """Raises InvalidRequest if a value is nested too deeply for a template."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise InvalidRequest(f"{field} is nested more than {MAX_DEPTH} deep", field=field)


def _tool_of(function: FunctionDefinition) -> dict[str, object]:
    given: dict[str, object] = {
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters,
    }
    if function.strict is not None:
        given["strict"] = function.strict
    return {"type": "function", "function": given}


def _check_function(function: FunctionDefinition, where: str, names: set[str]) -> None:
    field = f"{where}.name"
    if not 1 <= len(function.name) <= _MAX_NAME_CHARS:
        raise InvalidRequest(f"{field} has 1 to {_MAX_NAME_CHARS} characters", field=field)
    if _NOT_IN_NAMES.search(function.name):
        message = f"{field} has no quotes, backslashes, angle brackets or control characters"
        raise InvalidRequest(message, field=field)
    if function.name in names:
        raise InvalidRequest(f"{field}: another tool has this name", field=field)
    if function.parameters is not None:
        check_depth(function.parameters, f"{where}.parameters")
