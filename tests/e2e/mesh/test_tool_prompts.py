"""A mesh answers conversations with tools as plain vLLM does, also after the death of a decode.

Plain vLLM is vLLM without the mesh. The model is SmolLM2 with a chat template like that of Hermes,
which shows the tools. A prompt must equal the prompt that transformers, and so vLLM, makes of the
conversation.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import openai
import pytest
import pytest_asyncio

from pdmesh.launcher.mesh import Mesh
from pdmesh.launcher.spec import MeshSpec
from tests.e2e.cases import Case
from tests.e2e.conftest import plain_vllm
from tests.e2e.mesh.test_equality import mesh_spec

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # vLLM emits warnings
    pytest.mark.asyncio(loop_scope="session"),
]
NUM_TOKENS: Final = 12
NUM_AT_ONCE: Final = 4
TEMPLATE: Final = """
{%- if tools %}<|im_start|>system
Call a tool as <tool_call>{"name": <name>, "arguments": <object>}</tool_call>.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}<|im_start|>assistant
{%- for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role + '\\n' + message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOWNS: Final = (
    "Rome",
    "Paris",
    "Oslo",
    "Bonn",
    "Quito",
    "Lima",
    "Accra",
    "Kyoto",
    "Perth",
    "Turin",
)


def tool(name: str, **properties: str) -> dict[str, Any]:
    typed = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": typed, "required": sorted(typed)}
    described = {"name": name, "description": f"Tells the {name}.", "parameters": parameters}
    return {"type": "function", "function": described}


TOOLS: Final = [
    tool("weather", town="string", unit="string"),
    tool("time", town="string", is_utc="boolean"),
]


def conversations() -> list[list[dict[str, Any]]]:
    """Two conversations for each town.

    The first is a question. The second continues with the call, its result and a new question.
    """
    found: list[list[dict[str, Any]]] = []
    for index, town in enumerate(TOWNS):
        question = {"role": "user", "content": f"What is the weather in {town}?"}
        found.append([question])
        call = {"name": "weather", "arguments": json.dumps({"town": town, "unit": "celsius"})}
        called = [{"id": f"call_{index}", "type": "function", "function": call}]
        result = {"role": "tool", "tool_call_id": f"call_{index}", "content": f"{index} degrees"}
        said: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": called}
        found.append([question, said, result, {"role": "user", "content": "And the time?"}])
    return found


ASKED: Final = conversations()


@pytest.fixture(scope="module")
def tools_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "with-tools"
    shutil.copytree(model_dir, directory, copy_function=os.link)
    (directory / "chat_template.jinja").unlink()
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def rendered(directory: Path, messages: Sequence[dict[str, Any]]) -> list[int]:
    from transformers import AutoTokenizer

    given = json.loads(json.dumps(messages))
    for call in (c for m in given for c in m.get("tool_calls", ())):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    text = tokenizer.apply_chat_template(
        given, tools=TOOLS, add_generation_prompt=True, tokenize=False
    )
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


@pytest.fixture(scope="module")
def expected(
    tools_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Case], list[list[int]]]:
    """The cases and plain vLLM's tokens, each cut at its first near-tie.

    At a near-tie, two tokens are almost equally likely, so rounding may decide.
    """
    todo = [Case(tuple(rendered(tools_dir, each)), NUM_TOKENS) for each in ASKED]
    with plain_vllm(tools_dir, todo, tmp_path_factory.mktemp("plain")) as plain:
        return plain.decided(todo)


def spec(tools_dir: Path, num_pairs: int, num_fusion: int) -> MeshSpec:
    return replace(mesh_spec(tools_dir, num_pairs, num_fusion), tool_parser="hermes")


def client_of(mesh: Mesh) -> openai.AsyncOpenAI:
    url = f"{mesh.http_url}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="none", timeout=300, max_retries=0)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(
    tools_dir: Path,
    expected: tuple[list[Case], list[list[int]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Mesh]:
    """The mesh. It starts after `expected` is computed, because two cores are too few for both."""
    async with Mesh(spec(tools_dir, 1, 0), tmp_path_factory.mktemp("mesh")) as running:
        yield running


async def told(
    client: openai.AsyncOpenAI, number: int, num_tokens: int, mesh: Mesh | None, kill_at: int = 0
) -> tuple[list[int], list[int]]:
    """The tokens of the prompt and the answer. The decode of `mesh` dies after `kill_at` tokens."""
    asked: list[Any] = ASKED[number]
    tools: list[Any] = TOOLS
    stream = await client.chat.completions.create(
        model="default", messages=asked, tools=tools, max_tokens=num_tokens, temperature=0,
        stream=True, extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    prompt, drawn = list[int](), list[int]()
    async for chunk in stream:
        prompt += getattr(chunk, "prompt_token_ids", None) or []
        for choice in chunk.choices:
            drawn += getattr(choice, "token_ids", None) or []
        if mesh is not None and 0 < kill_at <= len(drawn):
            assert len(drawn) < num_tokens, "the decode dies within the answer"
            mesh.kill("decode-0")
            kill_at = 0
    assert kill_at <= 0
    return prompt, drawn


async def all_told(
    mesh: Mesh, expected: tuple[list[Case], list[list[int]]]
) -> list[tuple[list[int], list[int]]]:
    slots = asyncio.Semaphore(NUM_AT_ONCE)
    async with client_of(mesh) as client:

        async def ask(number: int) -> tuple[list[int], list[int]]:
            async with slots:
                return await told(client, number, len(expected[1][number]), None)

        return list(await asyncio.gather(*map(ask, range(len(ASKED)))))


def measure(expected: tuple[list[Case], list[list[int]]]) -> list[tuple[list[int], list[int]]]:
    cases, drawn = expected
    return [(list(case.prompt), tokens) for case, tokens in zip(cases, drawn, strict=True)]


@pytest.mark.req("S1", "S49")
async def test_a_pair_answers_as_plain_vllm_does(
    mesh: Mesh, expected: tuple[list[Case], list[list[int]]]
) -> None:
    assert len(ASKED) >= 20
    assert await all_told(mesh, expected) == measure(expected)


@pytest.mark.fault("F7")
@pytest.mark.parametrize("kill_at", [1, 2, 5])
async def test_an_answer_is_the_same_through_the_death_of_its_decode(
    mesh: Mesh, expected: tuple[list[Case], list[list[int]]], kill_at: int
) -> None:
    await mesh.wait_ready(timeout_s=240)
    longest = [n for n, tokens in enumerate(expected[1]) if len(tokens) == NUM_TOKENS]
    number = longest[kill_at]
    async with client_of(mesh) as client:
        got = await told(client, number, NUM_TOKENS, mesh, kill_at)
    assert got == measure(expected)[number]


@pytest.mark.req("S72")
async def test_fusion_answers_as_plain_vllm_does_with_tools(
    tools_dir: Path, expected: tuple[list[Case], list[list[int]]], tmp_path: Path
) -> None:
    async with Mesh(spec(tools_dir, 0, 1), tmp_path) as fusion:
        assert await all_told(fusion, expected) == measure(expected)
