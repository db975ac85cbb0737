"""Hostile grammars end the process that compiles them, and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pdmesh.core.sampling.constraint import MAX_GRAMMAR_BYTES
from pdmesh.engine.grammars.asked import AskedGrammar, GrammarKind
from pdmesh.engine.grammars.checker import MAX_VOCABULARIES
from pdmesh.engine.sim_tokenizer import write_sim_model
from pdmesh.errors import InvalidRequest, Overloaded
from pdmesh.services.gateway.text import grammar_checks
from pdmesh.services.gateway.text.grammar_checks import GrammarChecks
from pdmesh.services.gateway.text.tokenizer import Tokenizer

EXPLODES = {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9}


def of_schema(schema: Any, field: str = "response_format") -> AskedGrammar:
    return AskedGrammar(GrammarKind.JSON, json.dumps(schema), field)


@pytest.fixture
async def checks() -> AsyncIterator[GrammarChecks]:
    opened = GrammarChecks()
    yield opened
    await opened.close()


@pytest.fixture
def model(tmp_path: Path) -> Tokenizer:
    write_sim_model(tmp_path)
    return Tokenizer.load(tmp_path, max_chars=1000)


async def test_one_that_explodes_is_refused_and_an_honest_one_behind_it_is_not(
    checks: GrammarChecks, model: Tokenizer
) -> None:
    hostile = [
        asyncio.create_task(checks.grammar(of_schema(EXPLODES | {"title": str(n)}, "x"), model))
        for n in range(2)
    ]
    await asyncio.sleep(0)
    honest = await checks.grammar(of_schema({"type": "integer"}), model)
    assert "integer" in honest
    for refused in await asyncio.gather(*hostile, return_exceptions=True):
        assert isinstance(refused, InvalidRequest)
        assert refused.field == "x"
    process = checks._process
    with pytest.raises(InvalidRequest):
        await checks.grammar(of_schema(EXPLODES | {"title": "0"}, "x"), model)
    assert checks._process is process, "it is known"


async def test_equal_ones_are_asked_once(
    checks: GrammarChecks, model: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []
    ask = checks._ask

    async def counted(key: int, body: bytes, tokenizer: Tokenizer) -> Any:
        asked.append(body)
        return await ask(key, body, tokenizer)

    monkeypatch.setattr(checks, "_ask", counted)
    schema = of_schema({"type": "integer"})
    got = await asyncio.gather(*(checks.grammar(schema, model) for _ in range(20)))
    assert len(set(got)) == 1
    await checks.grammar(schema, model)
    assert len(asked) == 1


async def test_a_process_that_somebody_killed_is_replaced(
    checks: GrammarChecks, model: Tokenizer
) -> None:
    await checks.grammar(of_schema({"type": "integer"}), model)
    assert checks._process is not None
    os.kill(checks._process.pid, signal.SIGKILL)
    await checks._process.wait()
    await checks.grammar(of_schema({"type": "number"}), model)


async def test_what_waits_is_bounded(
    checks: GrammarChecks, model: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_checks, "_MAX_WAITING", 3)
    waiting = [
        asyncio.create_task(checks.grammar(of_schema({"enum": [n]}), model)) for n in range(3)
    ]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await checks.grammar(of_schema({"enum": ["x"]}), model)
    await asyncio.gather(*waiting)
    long = AskedGrammar(GrammarKind.REGEX, "a" * MAX_GRAMMAR_BYTES)
    with pytest.raises(InvalidRequest, match="more than"):
        await checks.grammar(long, model)


async def test_models_share_the_process_and_come_back_to_it(
    checks: GrammarChecks, model: Tokenizer, tmp_path: Path
) -> None:
    """It keeps a few vocabularies, and is given one again that left."""
    models = [model, *(Tokenizer.load(tmp_path, max_chars=1000) for _ in range(MAX_VOCABULARIES))]
    for number in range(3):
        for each in models:
            assert await checks.grammar(of_schema({"enum": [number]}), each)


async def test_closing_ends_it_while_it_works(model: Tokenizer) -> None:
    checks = GrammarChecks()
    task = asyncio.create_task(checks.grammar(of_schema(EXPLODES), model))
    while checks._process is None:
        await asyncio.sleep(0.001)
    process = checks._process
    await checks.close()
    assert await process.wait() != 0
    with pytest.raises(asyncio.CancelledError):
        await task
