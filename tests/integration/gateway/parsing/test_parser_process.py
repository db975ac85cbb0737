"""Lets the process with vLLM's parsers for tool calls and reasoning die, hang or fail to start.
Each answer must continue, or fail without effect on other answers.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdmesh.services.gateway.parsing.answer_parsing import AnswerParsers, ParserFailed, Parsing
from pdmesh.services.gateway.parsing.frames import OpenAnswer, ParserReply, ParserRequest
from pdmesh.services.gateway.parsing.parser_process import ParserProcess, ParserUnavailable
from pdmesh.services.gateway.text.choice_text import TextDelta
from pdmesh.services.gateway.text.text_stream import PLAIN
from pdmesh.services.gateway.text.tokenizer import Tokenizer
from tests.fakes.parser_child import DEADLY, FAULTY, HANGING, SLOW
from tests.fakes.tiny_model import write_tiny_model
from tests.support.waiting import until

CHILD = (sys.executable, "-m", "tests.fakes.parser_child")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(write_tiny_model(tmp_path), max_chars=1000)


@pytest.fixture
async def parsers() -> AsyncIterator[AnswerParsers]:
    made = AnswerParsers("hermes", "none", ParserProcess(CHILD))
    yield made
    await made.close()


class Answer:
    """The parsed answer of a call with one choice, as its client reads it."""

    def __init__(self, parsers: AnswerParsers, tokenizer: Tokenizer) -> None:
        parsing = Parsing(parsers, parsers.model(tokenizer), b"{}")
        self._parser = parsing.begin([array("I", [1])], PLAIN, is_whole=False)
        self.text = ""

    async def write(self, text: str, *, is_last: bool = False) -> None:
        ids = [ord(char) for char in text]
        delta = TextDelta(0, "", ids, (), is_last, "stop" if is_last else None)
        for told in await self._parser.parsed([delta]):
            self.text += told.text

    def close(self) -> None:
        self._parser.close()


@pytest.mark.fault("F7")
async def test_answers_continue_after_a_death_without_repetitions(
    parsers: AnswerParsers, tokenizer: Tokenizer
) -> None:
    first, second = Answer(parsers, tokenizer), Answer(parsers, tokenizer)
    await first.write("one ")
    await second.write("eins ")
    pid = parsers.pid
    with pytest.raises(ParserFailed):
        await Answer(parsers, tokenizer).write(chr(DEADLY))
    await asyncio.gather(first.write("two"), second.write("zwei", is_last=True))
    assert (first.text, second.text) == ("one two", "eins zwei")
    assert parsers.pid not in (None, pid)


@pytest.mark.fault("F7")
async def test_only_the_answer_that_kills_the_parsers_fails(
    parsers: AnswerParsers, tokenizer: Tokenizer
) -> None:
    """The other answers wait for the same process. They must not fail, even if the process dies
    several times.
    """
    answers = [Answer(parsers, tokenizer) for _ in range(8)]
    deadly = Answer(parsers, tokenizer)
    for answer in [*answers, deadly]:
        await answer.write("a")
    writes = [deadly.write(chr(DEADLY)), *(answer.write("b") for answer in answers)]
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert isinstance(results[0], ParserFailed)
    assert results[1:] == [None] * 8
    assert [answer.text for answer in answers] == ["ab"] * 8


async def test_a_fault_of_a_parser_ends_its_answer_and_no_process(
    parsers: AnswerParsers, tokenizer: Tokenizer
) -> None:
    other = Answer(parsers, tokenizer)
    await other.write("a")
    pid = parsers.pid
    with pytest.raises(ParserFailed) as caught:
        await Answer(parsers, tokenizer).write(chr(FAULTY))
    assert "ValueError" not in caught.value.message
    assert caught.value.http_status == 500
    await other.write("b")
    assert (other.text, parsers.pid) == ("ab", pid)


@pytest.mark.fault("F7")
async def test_parsers_that_hang_are_killed(tokenizer: Tokenizer) -> None:
    parsers = AnswerParsers("hermes", "none", ParserProcess(CHILD, answer_s=1.0))
    try:
        other = Answer(parsers, tokenizer)
        await other.write("a")
        with pytest.raises(ParserFailed):
            await Answer(parsers, tokenizer).write(chr(HANGING))
        await other.write("b")
        assert other.text == "ab"
    finally:
        await parsers.close()


@pytest.mark.fault("F7")
async def test_parsers_that_hang_over_an_answer_whose_client_left_are_killed(
    tokenizer: Tokenizer,
) -> None:
    parsers = AnswerParsers("hermes", "none", ParserProcess(CHILD, answer_s=1.0))
    try:
        other, left = Answer(parsers, tokenizer), Answer(parsers, tokenizer)
        await other.write("a")
        await left.write("x")
        writing = asyncio.create_task(left.write(chr(HANGING)))
        await asyncio.sleep(0)
        writing.cancel()
        await other.write("b")
        assert other.text == "ab"
    finally:
        await parsers.close()


@pytest.mark.fault("F7")
async def test_a_long_answer_is_fed_again_in_pieces(tokenizer: Tokenizer) -> None:
    """The parsers need twice as long for the whole answer as the time after which their process
    counts as hung.
    """
    parsers = AnswerParsers("hermes", "none", ParserProcess(CHILD, answer_s=0.6))
    try:
        long = Answer(parsers, tokenizer)
        for _ in range(10):
            await long.write(chr(SLOW) * 60)
        with pytest.raises(ParserFailed):
            await Answer(parsers, tokenizer).write(chr(DEADLY))
        await long.write("a")
        assert long.text == chr(SLOW) * 600 + "a"
    finally:
        await parsers.close()


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "print('no frame')"])
async def test_parsers_that_do_not_start_give_a_clear_error(
    tokenizer: Tokenizer, code: str
) -> None:
    parsers = AnswerParsers("hermes", "none", ParserProcess((sys.executable, "-c", code)))
    with pytest.raises(ParserUnavailable) as caught:
        await parsers.prepared(parsers.model(tokenizer), b"{}")
    assert caught.value.http_status == 503
    await parsers.close()


async def test_the_process_starts_with_the_first_call_and_ends_with_its_gateway(
    parsers: AnswerParsers, tokenizer: Tokenizer
) -> None:
    parsers.model(tokenizer)
    assert parsers.pid is None, "looking at a model's parsers starts no process"
    await asyncio.gather(*(parsers.prepared(parsers.model(tokenizer), b"{}") for _ in range(10)))
    pid = parsers.pid
    assert pid is not None
    answer = Answer(parsers, tokenizer)
    await answer.write("a")
    answer.close()
    await parsers.close()
    await until(lambda: not Path(f"/proc/{pid}").exists())


async def test_a_call_that_is_cancelled_leaves_the_others_replies_in_order(
    parsers: AnswerParsers, tokenizer: Tokenizer
) -> None:
    left, other = Answer(parsers, tokenizer), Answer(parsers, tokenizer)
    await left.write("x")
    await other.write("a")
    writing = asyncio.create_task(left.write("y"))
    await asyncio.sleep(0)
    writing.cancel()
    left.close()
    await other.write("b")
    assert other.text == "ab"


async def test_an_answer_whose_client_leaves_while_it_is_opened_is_closed(
    parsers: AnswerParsers, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the process would keep the answer and its prompt forever."""
    busy, left = Answer(parsers, tokenizer), Answer(parsers, tokenizer)
    await busy.write("a")
    life = await parsers.life()
    asked, closed = list[object](), list[int]()
    ask = life.ask

    async def noted(request: ParserRequest, limit_s: float | None = None) -> ParserReply:
        asked.append(request)
        return await ask(request, limit_s)

    monkeypatch.setattr(life, "ask", noted)
    monkeypatch.setattr(life, "close_choice", closed.append)
    hanging = asyncio.create_task(busy.write(chr(HANGING)))
    opening = asyncio.create_task(left.write("b"))
    await until(lambda: any(isinstance(each, OpenAnswer) for each in asked))
    opening.cancel()
    left.close()
    (opened,) = (each for each in asked if isinstance(each, OpenAnswer))
    assert closed == [opened.choice]
    hanging.cancel()
