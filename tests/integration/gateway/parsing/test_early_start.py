"""Tests when the gateway starts the process with vLLM's parsers for tool calls and reasoning. It
must start before the first chat that needs it, and only if a model needs parsers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pdmesh.errors import TokenizerUnavailable
from pdmesh.services.gateway.parsing.answer_parsing import AnswerParsers
from pdmesh.services.gateway.parsing.early_start import EarlyStart
from pdmesh.services.gateway.parsing.parser_process import (
    ParserLife,
    ParserProcess,
    ParserUnavailable,
)
from pdmesh.services.gateway.text.tokenizer import Tokenizer
from tests.fakes.gateway_mesh import gateway_mesh
from tests.fakes.tiny_model import write_tiny_model
from tests.support.waiting import until

CHILD = (sys.executable, "-m", "tests.fakes.parser_child")
CALLS = '<tool_call>{"name": "x", "arguments": {}}</tool_call>{{ tools | tojson }}'
REASONING = "</think>{% for m in messages %}{{ m.content }}{% endfor %}"


class Models:
    """The models that the instances serve, with their tokenizers."""

    def __init__(self, folder: Path) -> None:
        self.served: list[tuple[str, str]] = []
        self.loaded: list[str] = []
        self.unavailable: set[str] = set()
        self._folder = folder
        self._tokenizers: dict[str, Tokenizer] = {}

    def add(self, name: str, template: str) -> None:
        folder = write_tiny_model(self._folder / name, template, "qwen3")
        self._tokenizers[name] = Tokenizer.load(folder, max_chars=1000)
        self.served.append((name, f"digest of {name}"))

    async def tokenizer(self, name: str) -> Tokenizer:
        if name in self.unavailable:
            raise TokenizerUnavailable("not now")
        self.loaded.append(name)
        return self._tokenizers[name]


class Counted(ParserProcess):
    num_asked = 0

    async def life(self) -> ParserLife:
        self.num_asked += 1
        return await super().life()


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return Models(tmp_path)


@pytest.fixture
async def parsers() -> AsyncIterator[AnswerParsers]:
    made = AnswerParsers("auto", "auto", ParserProcess(CHILD, needs="sys"))
    yield made
    await made.close()


def early_start(parsers: AnswerParsers, models: Models, **more: Any) -> EarlyStart:
    return EarlyStart(parsers, lambda: models.served, models.tokenizer, **more)


async def test_the_parsers_start_early_for_a_model_whose_every_chat_is_parsed(
    parsers: AnswerParsers, models: Models
) -> None:
    start = early_start(parsers, models)
    await start.step()
    assert (parsers.pid, start.is_settled) == (None, False), "no model is served"
    models.add("plain", CALLS)
    models.add("thinker", CALLS + REASONING)
    await start.step()
    assert (parsers.pid is not None, start.is_settled) == (True, True)
    life = await parsers.life()
    tokenizer = await models.tokenizer("thinker")
    assert life.has(parsers.model(tokenizer).key), "its own parsers are loaded"


@pytest.mark.parametrize(("is_for_tools", "starts"), [(False, False), (True, True)])
async def test_a_setting_starts_the_parsers_early_for_models_that_need_them_for_tool_calls(
    parsers: AnswerParsers, models: Models, is_for_tools: bool, starts: bool
) -> None:
    models.add("caller", CALLS)
    start = early_start(parsers, models, is_for_tools=is_for_tools)
    for _ in range(3):
        await start.step()
    assert (parsers.pid is not None, start.is_settled) == (starts, True)
    assert models.loaded == ["caller"], "a tokenizer that leaves the memory is not called back"


@pytest.mark.fault("F7")
async def test_parsers_that_died_are_started_again_without_a_call(
    parsers: AnswerParsers, models: Models
) -> None:
    models.add("thinker", REASONING)
    start = early_start(parsers, models)
    await start.step()
    first = parsers.pid
    assert first is not None
    await start.step()
    assert parsers.pid == first
    os.kill(first, signal.SIGKILL)
    await until(lambda: parsers.pid is None)
    await start.step()
    assert parsers.pid not in (None, first)


async def test_a_start_that_fails_leaves_the_gateway_ready_and_is_not_tried_at_once_again(
    models: Models,
) -> None:
    now = 100.0
    models.add("thinker", REASONING)
    process = Counted((sys.executable, "-c", "raise SystemExit(3)"), needs="sys")
    parsers = AnswerParsers("auto", "auto", process)
    start = early_start(parsers, models, clock=lambda: now)
    await start.step()
    await start.step()
    assert (process.num_asked, start.is_settled) == (1, True)
    now += 31
    await start.step()
    assert process.num_asked == 2
    await parsers.close()


async def test_a_model_without_a_tokenizer_does_not_delay_others(
    parsers: AnswerParsers, models: Models
) -> None:
    models.add("away", REASONING)
    models.add("thinker", REASONING)
    models.unavailable.add("away")
    start = early_start(parsers, models)
    await start.step()
    assert parsers.pid is not None
    models.unavailable.clear()
    await start.step()
    life = await parsers.life()
    assert life.has(parsers.model(await models.tokenizer("away")).key)


@pytest.mark.parametrize(
    ("tool", "reasoning", "needs", "is_for_tools", "is_of_use"),
    [
        ("auto", "none", "sys", False, False),
        ("auto", "none", "sys", True, True),
        ("none", "none", "sys", True, False),
        ("auto", "auto", "no_such_package", True, False),
        ("none", "qwen3", "sys", False, True),
    ],
)
async def test_no_model_is_examined_if_none_can_need_parsers(
    models: Models, tool: str, reasoning: str, needs: str, is_for_tools: bool, is_of_use: bool
) -> None:
    parsers = AnswerParsers(tool, reasoning, ParserProcess(CHILD, needs=needs))
    start = early_start(parsers, models, is_for_tools=is_for_tools)
    assert (start.is_of_use, start.is_settled) == (is_of_use, not is_of_use)


async def test_a_caller_that_leaves_does_not_stop_a_start_that_others_wait_for(
    parsers: AnswerParsers, models: Models
) -> None:
    first = asyncio.create_task(parsers.life())
    second = asyncio.create_task(parsers.life())
    await asyncio.sleep(0)
    first.cancel()
    life = await second
    assert (life.is_over, await parsers.life()) == (False, life)


async def test_a_start_of_the_parsers_ends_with_its_gateway() -> None:
    process = ParserProcess((sys.executable, "-c", "import time; time.sleep(600)"))
    waiting = asyncio.create_task(process.life())
    await asyncio.sleep(0)
    await process.close()
    with pytest.raises(ParserUnavailable):
        await waiting


async def test_a_gateway_starts_the_parsers_with_its_first_model(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    async with gateway_mesh(tmp_path, template=REASONING, model_type="qwen3") as mesh:
        await until(lambda: mesh.gateway.parser_start.is_settled)
        assert mesh.gateway.frontend.shared.parsers.pid is not None
