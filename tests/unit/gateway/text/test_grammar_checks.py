"""Hostile grammars kill the process that compiles them, and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pdmesh.core.sampling.grammar_limits import MAX_GRAMMAR_BYTES
from pdmesh.core.tenancy.limits import ANYONE, Tenant
from pdmesh.engine.grammars.asked_grammars import AskedGrammar, GrammarKind
from pdmesh.engine.grammars.checker import MAX_VOCABULARIES, Checked
from pdmesh.engine.sim_tokenizer import write_sim_model
from pdmesh.errors import InvalidRequest, Overloaded
from pdmesh.services.gateway.text.grammar_checks import GrammarChecks
from pdmesh.services.gateway.text.grammar_process import (
    CheckInterrupted,
    GrammarProcess,
    KilledByGrammar,
)
from pdmesh.services.gateway.text.tokenizer import Tokenizer
from tests.support.waiting import until

EXPLODES = {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9}


def of_schema(schema: Any, field: str = "response_format") -> AskedGrammar:
    return AskedGrammar(GrammarKind.JSON, json.dumps(schema), field)


@pytest.fixture
def process() -> GrammarProcess:
    return GrammarProcess()


@pytest.fixture
async def checks(process: GrammarProcess) -> AsyncIterator[GrammarChecks]:
    opened = GrammarChecks(process)
    yield opened
    await opened.close()


@pytest.fixture
def model(tmp_path: Path) -> Tokenizer:
    write_sim_model(tmp_path)
    return Tokenizer.load(tmp_path, max_chars=1000)


async def test_an_exploding_grammar_is_refused_but_the_next_honest_one_is_not(
    checks: GrammarChecks, process: GrammarProcess, model: Tokenizer
) -> None:
    hostile = [
        asyncio.create_task(
            checks.grammar(of_schema(EXPLODES | {"title": str(n)}, "x"), model, ANYONE)
        )
        for n in range(2)
    ]
    await asyncio.sleep(0)
    honest = await checks.grammar(of_schema({"type": "integer"}), model, ANYONE)
    assert "integer" in honest
    for refused in await asyncio.gather(*hostile, return_exceptions=True):
        assert isinstance(refused, InvalidRequest)
        assert refused.field == "x"
    before = process._process
    with pytest.raises(InvalidRequest):
        await checks.grammar(of_schema(EXPLODES | {"title": "0"}, "x"), model, ANYONE)
    assert process._process is before, "the verdict is remembered"


async def test_equal_grammars_are_checked_once(
    checks: GrammarChecks,
    process: GrammarProcess,
    model: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[AskedGrammar] = []
    check = process.check

    async def counted(grammar: AskedGrammar, tokenizer: Tokenizer) -> Any:
        asked.append(grammar)
        return await check(grammar, tokenizer)

    monkeypatch.setattr(process, "check", counted)
    schema = of_schema({"type": "integer"})
    got = await asyncio.gather(*(checks.grammar(schema, model, ANYONE) for _ in range(20)))
    assert len(set(got)) == 1
    await checks.grammar(schema, model, ANYONE)
    assert len(asked) == 1


async def test_a_killed_process_is_replaced(
    checks: GrammarChecks, process: GrammarProcess, model: Tokenizer
) -> None:
    await checks.grammar(of_schema({"type": "integer"}), model, ANYONE)
    assert process._process is not None
    os.kill(process._process.pid, signal.SIGKILL)
    await process._process.wait()
    await checks.grammar(of_schema({"type": "number"}), model, ANYONE)


@pytest.mark.parametrize("ending", [signal.SIGSEGV, signal.SIGABRT])
async def test_an_innocent_grammar_is_compiled_again_alone(
    checks: GrammarChecks, process: GrammarProcess, model: Tokenizer, ending: signal.Signals
) -> None:
    """The process dies while it compiles this grammar, but an earlier grammar may be to blame."""
    await checks.grammar(of_schema({"type": "integer"}), model, ANYONE)
    first = process._process
    assert first is not None
    os.kill(first.pid, signal.SIGSTOP)
    waiting = asyncio.create_task(checks.grammar(of_schema({"enum": [1]}), model, ANYONE))
    await until(lambda: len(checks._checks) == 1 and not len(checks._room))
    os.kill(first.pid, ending)
    os.kill(first.pid, signal.SIGCONT)
    assert await waiting
    assert process._process is not first


class ScriptedChecker:
    """Compiles a grammar each time that `turn` is released, and records the order.

    A test can let some grammars kill the checker.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.killed: list[KilledByGrammar | CheckInterrupted] = []
        self.turn = asyncio.Semaphore(0)

    def key(self, tokenizer: Tokenizer) -> int:
        return 1

    async def check(self, asked: AskedGrammar, tokenizer: Tokenizer) -> Checked:
        self.asked.append(asked.text)
        await self.turn.acquire()
        if self.killed:
            raise self.killed.pop(0)
        return Checked(grammar=asked.text)

    async def close(self) -> None:
        pass


def named(name: str) -> AskedGrammar:
    return AskedGrammar(GrammarKind.REGEX, name)


@pytest.mark.parametrize(
    ("killed", "num_asked"),
    [([True], 1), ([False, True], 2), ([False, False], 2), ([False], 2)],
)
async def test_only_a_grammar_that_ran_alone_is_to_blame(
    model: Tokenizer, killed: list[bool], num_asked: int
) -> None:
    checker = ScriptedChecker()
    checker.killed = [KilledByGrammar(is_certain=each) for each in killed]
    checks = GrammarChecks(checker)
    checker.turn.release()
    checker.turn.release()
    for _ in range(2):
        if killed == [False]:
            assert await checks.grammar(named("a"), model, ANYONE) == "a"
        else:
            with pytest.raises(InvalidRequest, match="too much time or memory"):
                await checks.grammar(named("a"), model, ANYONE)
    assert checker.asked == ["a"] * num_asked
    await checks.close()


async def test_an_interrupted_check_has_no_verdict(model: Tokenizer) -> None:
    checker = ScriptedChecker()
    checker.killed = [KilledByGrammar(is_certain=False), CheckInterrupted()]
    checks = GrammarChecks(checker)
    for _ in range(3):
        checker.turn.release()
    with pytest.raises(Overloaded):
        await checks.grammar(named("a"), model, ANYONE)
    assert await checks.grammar(named("a"), model, ANYONE) == "a"
    await checks.close()


async def test_tenants_take_turns_and_a_flood_keeps_only_itself_out(model: Tokenizer) -> None:
    checker = ScriptedChecker()
    checks = GrammarChecks(checker)
    tenants = [Tenant("flood"), Tenant("other"), Tenant("third")]

    def ask(tenant: Tenant, name: str) -> asyncio.Task[str]:
        return asyncio.create_task(checks.grammar(named(name), model, tenant))

    flood = [ask(tenants[0], "flood-0")]
    await until(lambda: len(checker.asked) == 1)
    flood += [ask(tenants[0], f"flood-{n}") for n in range(1, 100)]
    await until(lambda: sum(task.done() for task in flood) == 100 - 1 - 64)
    others = [ask(tenant, f"{tenant.name}-{n}") for n in range(2) for tenant in tenants[1:]]
    await until(lambda: sum(task.done() for task in flood) == 100 - 1 - 64 + 4)
    for _ in range(100):
        checker.turn.release()
    assert await asyncio.gather(*others) == ["other-0", "third-0", "other-1", "third-1"]
    assert [name.split("-")[0] for name in checker.asked[:8]] == [
        "flood", "flood", "other", "third", "flood", "other", "third", "flood"
    ]  # fmt: skip
    results = await asyncio.gather(*flood, return_exceptions=True)
    assert {type(each) for each in results} == {str, Overloaded}
    assert [each for each in checker.asked if "flood" in each] == [
        f"flood-{n}" for n in range(61)
    ], "one tenant's checks keep their order"
    await checks.close()


async def test_a_check_without_a_waiting_request_does_not_begin(model: Tokenizer) -> None:
    checker = ScriptedChecker()
    checks = GrammarChecks(checker)
    one, two = Tenant("one"), Tenant("two")
    asked = [("first", one), ("left", one), ("left", two), ("left", two), ("last", one)]
    tasks = [asyncio.create_task(checks.grammar(named(n), model, t)) for n, t in asked]
    await until(lambda: checker.asked == ["first"] and len(checks._room) == 3)
    for left in tasks[:4]:
        left.cancel()
    checker.turn.release()
    checker.turn.release()
    assert await tasks[4] == "last"
    assert checker.asked == ["first", "last"]
    assert await checks.grammar(named("first"), model, two) == "first", (
        "the verdict of a check that began is kept"
    )
    assert checker.asked == ["first", "last"]
    assert not checks._checks
    await checks.close()


async def test_a_cancelled_check_goes_on_for_another_tenant_with_an_equal_grammar(
    model: Tokenizer,
) -> None:
    checker = ScriptedChecker()
    checks = GrammarChecks(checker)
    one, two = Tenant("one"), Tenant("two")
    asked = [("first", one), ("second", one), ("shared", one), ("shared", two)]
    tasks = [asyncio.create_task(checks.grammar(named(n), model, t)) for n, t in asked]
    await until(lambda: checker.asked == ["first"] and len(checks._room) == 3)
    tasks[2].cancel()
    for _ in range(3):
        checker.turn.release()
    assert await asyncio.gather(tasks[1], tasks[3]) == ["second", "shared"]
    assert sorted(checker.asked) == ["first", "second", "shared"]
    await checks.close()


async def test_the_number_of_waiting_checks_is_bounded(
    checks: GrammarChecks, model: Tokenizer
) -> None:
    checks._room.max_waiting = 3
    waiting = [
        asyncio.create_task(checks.grammar(of_schema({"enum": [n]}), model, ANYONE))
        for n in range(3)
    ]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await checks.grammar(of_schema({"enum": ["x"]}), model, ANYONE)
    await asyncio.gather(*waiting)
    long = AskedGrammar(GrammarKind.REGEX, "a" * MAX_GRAMMAR_BYTES)
    with pytest.raises(InvalidRequest, match="more than"):
        await checks.grammar(long, model, ANYONE)


async def test_models_share_the_process_and_come_back_to_it(
    checks: GrammarChecks, model: Tokenizer, tmp_path: Path
) -> None:
    """The process keeps only a few vocabularies. If a dropped one is needed, it is sent again."""
    models = [model, *(Tokenizer.load(tmp_path, max_chars=1000) for _ in range(MAX_VOCABULARIES))]
    for number in range(3):
        for each in models:
            assert await checks.grammar(of_schema({"enum": [number]}), each, ANYONE)


async def test_closing_ends_the_process_while_it_compiles(model: Tokenizer) -> None:
    process = GrammarProcess()
    checks = GrammarChecks(process)
    task = asyncio.create_task(checks.grammar(of_schema(EXPLODES), model, ANYONE))
    await until(lambda: process._process is not None)
    child = process._process
    assert child is not None
    await checks.close()
    assert await child.wait() != 0
    with pytest.raises(asyncio.CancelledError):
        await task
