"""Tool calls of a real model through a mesh continue when the decode is killed in the middle.

The model was not trained on tools. In one test, it continues a conversation that consists of Hermes
calls. In the other, a grammar makes it call a tool.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import jsonschema
import openai
import pytest

from pdmesh.launcher.mesh import Mesh
from tests.e2e.mesh.test_equality import mesh_spec
from tests.support.waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="session"),
]
TOOLS: Final[list[Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
]
STRICT: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "town": {"type": "string", "maxLength": 12},
        "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["town", "unit", "days"],
    "additionalProperties": False,
}
STRICT_TOOLS: Final[list[Any]] = [
    {"type": "function", "function": {"name": name, "strict": True, "parameters": STRICT}}
    for name in ("weather", "forecast")
]
NAMED: Final[Any] = {"type": "function", "function": {"name": "forecast"}}
TOWNS: Final = ("Rome", "Paris", "Oslo", "Madrid")


def conversation(town: str) -> list[Any]:
    messages: list[Any] = []
    for asked in (*TOWNS, town):
        messages.append({"role": "user", "content": f"What is the weather in {asked}?"})
        if asked != town:
            arguments = json.dumps({"town": asked, "unit": "celsius"})
            call = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
            messages.append({"role": "assistant", "content": call})
    return messages


@dataclass
class Heard:
    content: str = ""
    name: str = ""
    arguments: str = ""
    num_ids: int = 0
    finish_reason: str | None = None

    def add(self, choice: Any) -> None:
        self.content += choice.delta.content or ""
        self.finish_reason = choice.finish_reason or self.finish_reason
        for call in choice.delta.tool_calls or ():
            assert call.index == 0
            self.num_ids += call.id is not None
            self.name += call.function.name or ""
            self.arguments += call.function.arguments or ""


async def heard(
    client: openai.AsyncOpenAI, town: str, mesh: Mesh, kill: str = "", **fields: Any
) -> Heard:
    """Stream a tool call. The process `kill` dies after the first piece of the arguments."""
    found = Heard()
    asked = {"tools": TOOLS, "max_tokens": 48, **fields}
    stream = await client.chat.completions.create(
        model="default", messages=conversation(town), temperature=0, stream=True, **asked
    )
    async for chunk in stream:
        for choice in chunk.choices:
            found.add(choice)
        if kill and found.arguments:
            assert found.finish_reason is None
            mesh.kill(kill)
            kill = ""
    assert not kill
    return found


@pytest.mark.fault("F7")
async def test_a_tool_call_continues_after_the_death_of_its_decode(
    model_dir: Path, tmp_path: Path
) -> None:
    spec = replace(mesh_spec(model_dir, 1, 0), tool_parser="hermes")
    async with (
        Mesh(spec, tmp_path) as mesh,
        openai.AsyncOpenAI(
            base_url=f"{mesh.http_url}/v1", api_key="none", timeout=300, max_retries=0
        ) as client,
    ):
        unbroken = await heard(client, "Berlin", mesh)
        assert (unbroken.num_ids, unbroken.name, unbroken.finish_reason) == (
            1,
            "weather",
            "tool_calls",
        )
        assert json.loads(unbroken.arguments)["town"] == "Berlin"
        whole = await client.chat.completions.create(
            model="default", messages=conversation("Berlin"), tools=TOOLS, max_tokens=48,
            temperature=0,
        )  # fmt: skip
        calls: Any = whole.choices[0].message.tool_calls
        (call,) = calls
        assert json.loads(call.function.arguments) == json.loads(unbroken.arguments)
        assert await heard(client, "Berlin", mesh, kill="decode-0") == unbroken


@pytest.mark.fault("F7")
@pytest.mark.parametrize("parser", ["hermes", "glm45"])
async def test_calls_that_have_to_be_made_go_on_through_the_death_of_their_decode(
    model_dir: Path, tmp_path: Path, parser: str
) -> None:
    """Calls are in JSON or XML. The next decode's matcher first takes the tokens drawn before."""
    spec = replace(mesh_spec(model_dir, 1, 0), tool_parser=parser)
    async with (
        Mesh(spec, tmp_path) as mesh,
        openai.AsyncOpenAI(
            base_url=f"{mesh.http_url}/v1", api_key="none", timeout=300, max_retries=0
        ) as client,
    ):
        for choice, names, reason in (
            ("required", {"weather", "forecast"}, "tool_calls"),
            (NAMED, {"forecast"}, "stop"),
        ):
            asked: dict[str, Any] = {
                "tools": STRICT_TOOLS, "tool_choice": choice, "max_tokens": 160,
                "parallel_tool_calls": False,
            }  # fmt: skip
            unbroken = await heard(client, "Berlin", mesh, **asked)
            assert (unbroken.num_ids, unbroken.finish_reason) == (1, reason)
            assert unbroken.name in names
            jsonschema.validate(json.loads(unbroken.arguments), STRICT)
            assert await heard(client, "Berlin", mesh, kill="decode-0", **asked) == unbroken
            await until(lambda: mesh_serves(client))


async def mesh_serves(client: openai.AsyncOpenAI) -> bool:
    """Whether the mesh answers a request."""
    try:
        await client.completions.create(model="default", prompt="a", max_tokens=4)
    except openai.APIStatusError:
        return False
    return True
