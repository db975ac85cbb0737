"""Sends bad tools and bad tool calls to the gateway. It must answer 400, name the field, and do
only a bounded amount of work.
"""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from pdmesh.launcher.mesh import Mesh
from tests.support.attack.abuse import (
    attack,
    blocks_no_longer_than_ten_honest_ones,
    honest_body,
    post,
    served_meanwhile,
)

CHAT: Final = "/v1/chat/completions"
USER: Final = {"role": "user", "content": "hi"}


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"properties": schema}
    return schema


def body_of(*messages: dict[str, Any], **fields: Any) -> bytes:
    given = {"model": "default", "messages": [USER, *messages], "max_tokens": 3, **fields}
    return json.dumps(given).encode()


def asked(*arguments: str) -> dict[str, Any]:
    calls = [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
        for text in arguments
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


WIDE: Final = {"properties": {f"p{at}": {"type": "string"} for at in range(5_000)}}
BAD: Final[dict[str, tuple[bytes, str | None]]] = {
    "a thousand tools": (
        body_of(tools=[tool(f"f{at}", parameters=nested(9)) for at in range(1000)]), "tools"),
    "names that are not unique": (
        body_of(tools=[tool(f"f{at % 127}") for at in range(128)]), "tools[127].function.name"),
    "a name without end": (body_of(tools=[tool("x" * 1_000_000)]), "tools[0].function.name"),
    "a deep schema": (
        body_of(tools=[tool(parameters=nested(400))]), "tools[0].function.parameters"),
    "a wide schema": (body_of(tools=[tool(parameters=WIDE)] * 4), "tools"),
    "a choice of no tool": (
        body_of(tools=[tool()], tool_choice={"function": {"name": "g" * 100_000}}),
        "tool_choice.function.name"),
    "a result without its call": (
        body_of({"role": "tool", "content": "x", "tool_call_id": "c"}),
        "messages[1].tool_call_id"),
    "two thousand results without calls": (
        body_of(*[{"role": "tool", "content": "x", "tool_call_id": "c"}] * 2000),
        "messages[1].tool_call_id"),
    "a thousand calls": (body_of(asked(*["{}"] * 1000)), "messages[1].tool_calls"),
    "deep arguments": (
        body_of(asked('{"a": ' + "[" * 9_999 + "]" * 9_999 + "}")),
        "messages[1].tool_calls[0].function.arguments"),
    "arguments without end": (
        body_of(*[asked('{"a": [' + "{}," * 100_000 + "1]}")] * 20), "messages"),
    "arguments of quotes": (body_of(asked('"' * 3_000_000 + "{}," * 100_000)), "messages"),
    "variables without end": (
        body_of(chat_template_kwargs={"a": [{}] * 40_000}), "chat_template_kwargs"),
    "a variable that is ours": (
        body_of(chat_template_kwargs={"messages": []}), "chat_template_kwargs.messages"),
}  # fmt: skip


@pytest.mark.fault("F31", "F32")
async def test_bad_tools_get_a_400_that_names_the_field_and_disturb_no_other(mesh: Mesh) -> None:
    async with served_meanwhile(mesh):
        for case, (body, field) in BAD.items():
            ended = await attack(mesh, post(body, CHAT))
            assert ended.status == 400, (case, ended.answer[:300])
            error = json.loads(ended.answer.partition(b"\r\n\r\n")[2])["error"]
            assert error["param"] == field, case
            assert len(error["message"]) < 500, case


@pytest.mark.fault("F31", "F32")
@pytest.mark.parametrize("case", BAD)
async def test_bad_tools_hold_the_loop_no_longer_than_ten_honest_requests(
    mesh: Mesh, case: str
) -> None:
    body, _ = BAD[case]
    honest = post(honest_body(len(body)), CHAT)
    await blocks_no_longer_than_ten_honest_ones(mesh, post(body, CHAT), honest)
