"""Tests that other clients work with a gateway without changes, at pinned versions:
langchain-openai, pydantic-ai, instructor, litellm and aiperf.

Each client has an environment of its own, because its packages conflict with those of the tests.
The first test that needs an environment makes it, in the same way as `make setup`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from pdmesh.core.kv.prefix.block_hash import tokens_from_bytes
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.fakes.tiny_model import EOS, write_tiny_model
from tests.support.waiting import until

# The first test of a client installs the client, which takes minutes on a busy machine.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[4]
# When a test times out, its thread may go on installing. The lock makes the next test wait for that
# thread.
INSTALLING = threading.Lock()


def python_with(requirements: str) -> str:
    """The path of Python in an environment with these requirements. Installs the environment if it
    is missing.
    """
    folder = ROOT / ".cache" / "clients" / requirements
    python, done = folder / "bin" / "python", folder / ".done"
    pinned = ROOT / "requirements" / f"{requirements}.txt"
    with INSTALLING:
        if not done.exists() or done.read_text() != pinned.read_text():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            pip = [str(python), "-m", "pip", "install", "--quiet"]
            options = ["--no-deps", "--require-hashes", "-r", str(pinned)]
            subprocess.run([*pip, *options], check=True)
            done.write_text(pinned.read_text())
    return str(python)


async def answers(requirements: str, program: str, url: str, *options: str) -> dict[str, Any]:
    python = await asyncio.to_thread(python_with, requirements)
    process = await asyncio.create_subprocess_exec(
        python,
        str(ROOT / "tests" / "clients" / program),
        f"{url}/v1",
        *options,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, log = await process.communicate()
    assert process.returncode == 0, log.decode()[-3000:]
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


async def test_langchain_and_pydantic_ai(mesh: GatewayMesh) -> None:
    found = await answers("clients", "langchain_and_pydantic_ai.py", mesh.url)
    expected = mesh.expected_text(mesh.chat_prompt("hello"), 8)
    assert found["chat, streamed"] == expected
    assert found["usage"]["output_tokens"] == 8
    assert found["completion"] == found["completion, streamed"] == mesh.expected_text("hello", 8)
    assert found["agent"] == found["agent, streamed"]
    assert [len(text) for text in found["batch"]] == [8, 8]
    assert all(found[name] for name in ("chat", "shaped", "no tool"))


async def test_litellm_as_to_openai_and_as_to_vllm(mesh: GatewayMesh) -> None:
    found = await answers("litellm", "through_litellm.py", mesh.url)
    expected = mesh.expected_text(mesh.chat_prompt("hello"), 8)
    for provider in ("openai", "hosted_vllm"):
        assert found[provider] == found[f"{provider}, streamed"] == expected
        assert found[f"{provider}, usage"] == 8
        assert found[f"{provider}, shaped"]
    assert found["completion"] == mesh.expected_text("hello", 8)


WEATHER = {"town": "Köln", "degrees": 7}
TEMPLATE = """{% if tools %}<tool_call>{"name": <name>, "arguments": <object>}</tool_call>
{%- endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"""


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "JSON"])
async def test_instructor_gets_a_pydantic_model_after_a_wrong_answer(
    tmp_path: Path, mode: str
) -> None:
    """Instructor asks the model for an object. The model's first answer does not fit the object's
    schema, so Instructor reports the error to the model and asks again.
    """
    pytest.importorskip("vllm")
    await asyncio.to_thread(python_with, "instructor")
    written = json.dumps(WEATHER, ensure_ascii=False)
    wrong = written.replace("7", '"cold"')
    async with gateway_mesh(tmp_path, template=TEMPLATE, model_type="qwen2") as mesh:

        def write(text: str) -> None:
            if mode == "TOOLS":
                text = f'<tool_call>\n{{"name": "Weather", "arguments": {text}}}\n</tool_call>'
            script = [*mesh.tokenizer._encode(text, add_special_tokens=False), EOS]
            for instance in mesh.instances.values():
                instance.script = script

        write(wrong)
        url = mesh.url
        asking = asyncio.create_task(answers("instructor", "through_instructor.py", url, mode))
        await until(lambda: asking.done() or mesh.gateway.observer.num_ended["completed"])
        write(written)
        found = await asking
        assert found["whole"] == found["streamed"] == WEATHER
        legs = [leg for instance in mesh.instances.values() for leg in instance.prefills]
        assert len(legs) >= 3, "the wrong one, the right one, the streamed one"
        assert all(leg.sampling.constraint.grammar for leg in legs)
        prompts = [tokens_from_bytes(leg.prompt_token_ids) for leg in legs]
        texts = [await mesh.tokenizer.decode_prompt(ids) for ids in prompts]
        role = "<tool>" if mode == "TOOLS" else "<user>"
        assert texts[1].count(role) > texts[0].count(role)
        assert "should be a valid integer" in texts[1]


@pytest.mark.parametrize("door", ["chat", "completions", "responses", "messages"])
async def test_aiperf_measures_each_endpoint(mesh: GatewayMesh, tmp_path: Path, door: str) -> None:
    python = await asyncio.to_thread(python_with, "aiperf")
    tokenizer = write_tiny_model(tmp_path / "tiny")
    process = await asyncio.create_subprocess_exec(
        *(str(Path(python).with_name("aiperf")), "profile", "--model-names", "tiny"),
        *("--url", mesh.url, "--endpoint-type", door, "--streaming"),
        *("--tokenizer", str(tokenizer), "--ui", "none"),
        *("--request-count", "12", "--concurrency", "3"),
        *("--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "8"),
        *("--artifact-dir", str(tmp_path / "artifacts")),
        # Other tests set HF_HUB_OFFLINE. With this variable, aiperf would not look for a tokenizer
        # in a folder.
        env={name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    log, _ = await process.communicate()
    assert process.returncode == 0, log.decode()[-3000:]
    found = json.loads((tmp_path / "artifacts" / "profile_export_aiperf.json").read_text())
    assert found["is_complete"]
    assert not found["error_summary"]
    assert found["request_count"]["avg"] == 12
    assert found["time_to_first_token"]["count"] == 12, "each answer was streamed"
    # In the Responses API, aiperf ignores the usage of an answer that `max_tokens` ended.
    if door != "responses":
        assert found["total_usage_completion_tokens"]["avg"] == 12 * 8
