"""vLLM's parsers read the answers of several model families.

In whichever pieces the tokens come, a client gets the same output as from plain vLLM.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.decoders import DecodeStream

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("ignore")  # importing vLLM raises warnings


@dataclass(frozen=True)
class Family:
    """An answer of a model family.

    `special` and `plain` are texts that are single tokens: special tokens and ordinary tokens.
    """

    tool: str
    reasoning: str
    answer: str
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    names: tuple[str, ...] = ("weather", "time")
    prompt: str = "<user>Weather?<assistant>"


ARGUMENTS: Final = (
    '{"town": "K\u00f6ln \U0001f327", "at": [1, 2.5, {"x": null}], "q": "a \\"b\\" {c} </d>"}'
)
_DS: Final = "\uff5c"
FAMILIES: Final = {
    "hermes": Family(
        "hermes",
        "",
        "I look it up.\n<tool_call>\n"
        f'{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
        plain=("<tool_call>", "</tool_call>"),
    ),
    "qwen3": Family(
        "hermes",
        "qwen3",
        "<think>\nThe user asks for <b>weather</b>\u2026\n</think>\n\n<tool_call>\n"
        f'{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
        plain=("<tool_call>", "</tool_call>", "<think>", "</think>"),
        names=("weather",),
    ),
    "qwen3 coder": Family(
        "qwen3_coder",
        "",
        "Sure.\n<tool_call>\n<function=weather>\n<parameter=town>\nK\u00f6ln\n</parameter>\n"
        "<parameter=at>\n[1, 2]\n</parameter>\n</function>\n</tool_call>",
        plain=("<tool_call>", "</tool_call>"),
        names=("weather",),
    ),
    "llama 3": Family(
        "llama3_json",
        "",
        f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}; '
        '{"name": "time", "parameters": {"zone": "CET"}}',
        special=("<|python_tag|>",),
    ),
    "mistral": Family(
        "mistral",
        "",
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}, '
        '{"name": "time", "arguments": {}}]',
        special=("[TOOL_CALLS]",),
    ),
    "deepseek r1": Family(
        "",
        "deepseek_r1",
        "So the town is K\u00f6ln.\n</think>\n\nIt rains \U0001f327.",
        plain=("<think>", "</think>"),
        names=(),
        prompt="<user>Weather?<assistant><think>\n",
    ),
    "deepseek v3": Family(
        "deepseek_v3",
        "",
        f"<{_DS}tool\u2581calls\u2581begin{_DS}><{_DS}tool\u2581call\u2581begin{_DS}>function"
        f'<{_DS}tool\u2581sep{_DS}>weather\n```json\n{{"town": "K\u00f6ln"}}\n```'
        f"<{_DS}tool\u2581call\u2581end{_DS}><{_DS}tool\u2581calls\u2581end{_DS}>",
        plain=tuple(
            f"<{_DS}tool\u2581{part}{_DS}>"
            for part in (
                "calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep",
            )
        ),
        names=("weather",),
    ),
    "kimi k2": Family(
        "kimi_k2",
        "",
        "One moment.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>"
        "functions.time:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        special=(
            "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>", "<|tool_call_end|>",
        ),
    ),
}  # fmt: skip
TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"town": {"type": "string"}, "at": {"type": "array"}},
            },
        },
    }
    for name in ("weather", "time")
]


@cache
def tokenizer_of(name: str) -> Tokenizer:
    """A tokenizer whose byte merges are made from the answer. So a token may end within a mark."""
    family = FAMILIES[name]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator([family.answer] * 3, trainer)
    inner.add_special_tokens(["<eos>", *family.special])
    inner.add_tokens(list(family.plain))
    return inner


def request_of(family: Family, **fields: Any) -> bytes:
    tools = TOOLS if family.tool else None
    choice = "auto" if tools else "none"
    messages = [{"role": "user", "content": ""}]
    given = {"model": "m", "messages": messages, "tools": tools, "tool_choice": choice, **fields}
    return json.dumps(given).encode()


@pytest.fixture(scope="module")
def parsers() -> Any:
    from pdmesh.services.gateway.parsing.frames import LoadParsers, ParserDone
    from pdmesh.services.gateway.parsing.parser_requests import ParserRequests

    made = ParserRequests(max_models=2 * len(FAMILIES))
    for name, family in FAMILIES.items():
        told = made.handle(
            LoadParsers(
                name, tokenizer_of(name).to_str(), {"eos_token": "<eos>"}, "qwen3",
                family.tool, family.reasoning,
            )
        )  # fmt: skip
        assert told == ParserDone(), (name, told)
    return made


@dataclass
class Told:
    """All deltas of a choice put together, without the random ids of tool calls."""

    reasoning: str = ""
    content: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)

    def add(self, pieces: Iterable[Any]) -> None:
        for piece in pieces:
            self.reasoning += piece.reasoning
            self.content += piece.content
            for call in piece.calls:
                if call.index not in self.calls:
                    assert call.id
                    assert call.name
                    self.calls[call.index] = [call.name, ""]
                else:
                    assert (call.id, call.name) == ("", ""), "told once"
                self.calls[call.index][1] += call.arguments


def ids_of(name: str) -> list[int]:
    inner = tokenizer_of(name)
    eos = inner.token_to_id("<eos>")
    assert eos is not None
    return [*inner.encode(FAMILIES[name].answer, add_special_tokens=False).ids, eos]


class Choices:
    def __init__(self, parsers: Any, name: str) -> None:
        self._parsers, self._name, self._num = parsers, name, 0

    def open(self, *, is_whole: bool = False, **fields: Any) -> int:
        from pdmesh.services.gateway.parsing.frames import OpenAnswer, ParserDone, PrepareAnswer

        inner, family = tokenizer_of(self._name), FAMILIES[self._name]
        request = request_of(family, **fields)
        prepared = self._parsers.handle(PrepareAnswer(self._name, request))
        prompt = array("I", inner.encode(family.prompt).ids).tobytes()
        self._num += 1
        told = self._parsers.handle(
            OpenAnswer(
                self._num, self._name, request, prompt, is_whole, (), 0, False,
                prepared.are_special_shown, ids_of(self._name)[-1:],
            )
        )  # fmt: skip
        assert told == ParserDone(), told
        return self._num

    def feed(self, choice: int, ids: Sequence[int], *, is_last: bool = False) -> list[Any]:
        from pdmesh.services.gateway.parsing.frames import FeedAnswer, ParsedTokens

        reply = self._parsers.handle(FeedAnswer(choice, list(ids), is_last))
        assert isinstance(reply, ParsedTokens), reply
        assert not reply.pieces or sum(piece.num_tokens for piece in reply.pieces) == len(ids)
        return reply.pieces

    def told(self, parts: Iterable[Sequence[int]], **fields: Any) -> Told:
        told, choice = Told(), self.open(**fields)
        left = list(parts)
        for at, part in enumerate(left):
            told.add(self.feed(choice, part, is_last=at == len(left) - 1))
        return told


def in_vllm(name: str) -> Told:
    """The output of plain vLLM's own loop, with its detokenizer and parser, token by token."""
    from transformers import PreTrainedTokenizerFast
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser import ParserManager
    from vllm.tokenizers.hf import get_cached_tokenizer

    family, inner = FAMILIES[name], tokenizer_of(name)
    tokenizer = get_cached_tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    )
    kind: Any = ParserManager.get_parser(
        tool_parser_name=family.tool or None,
        reasoning_parser_name=family.reasoning or None,
        enable_auto_tools=bool(family.tool),
    )
    request = ChatCompletionRequest.model_validate_json(request_of(family))
    request = kind(tokenizer, request.tools).adjust_request(request)
    parser = kind(tokenizer, request.tools)
    prompt = inner.encode(family.prompt).ids
    stream = DecodeStream(ids=prompt, skip_special_tokens=request.skip_special_tokens)
    told, ids = Told(), ids_of(name)
    for at, token_id in enumerate(ids):
        is_end = at == len(ids) - 1
        text = "" if is_end else stream.step(inner, token_id) or ""
        delta = parser.parse_delta(text, [token_id], request, prompt, finished=is_end)
        if delta is None:
            continue
        told.reasoning += delta.reasoning or ""
        told.content += delta.content or ""
        for call in delta.tool_calls:
            found = told.calls.setdefault(call.index, ["", ""])
            found[0] += (call.function.name or "") if call.function else ""
            found[1] += (call.function.arguments or "") if call.function else ""
    return told


def cuts(ids: Sequence[int]) -> Iterator[list[Sequence[int]]]:
    """The tokens in two pieces for each place of the cut, then one by one, then three by three."""
    yield from ([ids[:at], ids[at:]] for at in range(1, len(ids)))
    yield [ids[at : at + 1] for at in range(len(ids))]
    yield [ids[at : at + 3] for at in range(0, len(ids), 3)]


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_reads_as_in_plain_vllm(parsers: Any, name: str) -> None:
    told = Choices(parsers, name).told([ids_of(name)])
    assert told == in_vllm(name)
    assert [call for call, _ in told.calls.values()] == list(FAMILIES[name].names)
    for _, arguments in told.calls.values():
        assert isinstance(json.loads(arguments), dict)
    assert bool(told.reasoning) == bool(FAMILIES[name].reasoning)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_cut_anywhere_gives_the_same_output(parsers: Any, name: str) -> None:
    """Tokens come in pieces from prefill, decode, and the instances after a migration."""
    choices, ids = Choices(parsers, name), ids_of(name)
    uncut = choices.told([ids])
    for parts in cuts(ids):
        assert choices.told(parts) == uncut, list(map(len, parts))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_choice_whose_tokens_are_fed_again_continues_where_it_was(
    parsers: Any, name: str
) -> None:
    """When the parser's process has died, a new one gets all tokens again. Here that happens after
    each token.
    """
    choices, ids = Choices(parsers, name), ids_of(name)
    uncut = choices.told([ids])
    for at in range(1, len(ids)):
        told = Told()
        told.add(choices.feed(choices.open(), ids[:at]))
        again = choices.open()
        choices.feed(again, ids[:at])
        told.add(choices.feed(again, ids[at:], is_last=True))
        assert told == uncut, at


@pytest.mark.parametrize("name", FAMILIES)
def test_a_whole_answer_has_the_calls_and_the_reasoning_of_the_stream(
    parsers: Any, name: str
) -> None:
    choices, ids = Choices(parsers, name), ids_of(name)
    whole, uncut = choices.told([ids], is_whole=True), choices.told([ids])
    assert whole.reasoning.strip() == uncut.reasoning.strip()
    assert whole.content.strip() == uncut.content.strip()
    assert [(call, json.loads(args)) for call, args in whole.calls.values()] == [
        (call, json.loads(args)) for call, args in uncut.calls.values()
    ]


def test_unrequested_reasoning_is_not_reported(parsers: Any) -> None:
    choices, ids = Choices(parsers, "qwen3"), ids_of("qwen3")
    for is_whole in (False, True):
        told = choices.told([ids], is_whole=is_whole, include_reasoning=False)
        assert told.reasoning == ""
        assert told.calls


def test_forbidden_tool_calls_are_not_reported(parsers: Any) -> None:
    choices, ids = Choices(parsers, "qwen3"), ids_of("qwen3")
    for is_whole in (False, True):
        assert choices.told([ids], is_whole=is_whole, tool_choice="none").calls == {}


def test_a_parser_that_does_not_fit_the_tokenizer_is_refused(parsers: Any) -> None:
    from pdmesh.services.gateway.parsing.frames import LoadParsers, ParsingFailed

    for tool, reasoning in (("mistral", ""), ("no_such", ""), ("", "deepseek_r1")):
        text = tokenizer_of("hermes").to_str()
        reply = parsers.handle(LoadParsers("bad", text, {}, "", tool, reasoning))
        assert isinstance(reply, ParsingFailed)
        assert reply.is_refusal
        assert len(reply.message) <= 500


class _Child:
    """The parser process itself. It has the method of `ParserRequests` that `Choices` calls."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout

    def handle(self, request: Any) -> Any:
        from pdmesh.services.gateway.parsing.frames import framed

        self._stdin.write(framed(request))
        self._stdin.flush()
        return self.reply()

    def reply(self) -> Any:
        from pdmesh.services.gateway.parsing.frames import LENGTH, replies

        (size,) = LENGTH.unpack(self._stdout.read(LENGTH.size))
        return replies.decode(self._stdout.read(size))


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_call_that_is_cut_off_leaves_no_traceback_in_the_log(is_whole: bool) -> None:
    from pdmesh.services.gateway.parsing.frames import LoadParsers

    tokenizer = tokenizer_of("hermes").to_str()
    command = [sys.executable, "-m", "pdmesh.services.gateway.parsing.child"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        child = _Child(process)
        child.reply()  # the reply that the process has started
        child.handle(LoadParsers("hermes", tokenizer, {"eos_token": "<eos>"}, "", "hermes", ""))
        choices = Choices(child, "hermes")
        choice = choices.open(is_whole=is_whole)
        ids = ids_of("hermes")
        choices.feed(choice, ids[: len(ids) // 2], is_last=True)
        _, logged = process.communicate()
    assert b"Traceback" not in logged, logged.decode()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_constraint_begins_after_the_reasoning_unless_the_prompt_ends_it(
    parsers: Any, name: str
) -> None:
    from pdmesh.services.gateway.parsing.frames import PrepareAnswer, PreparedAnswer

    inner, family = tokenizer_of(name), FAMILIES[name]

    def begins_after(prompt: str) -> list[int]:
        ids = array("I", inner.encode(prompt).ids).tobytes()
        reply = parsers.handle(PrepareAnswer(name, request_of(family, tool_choice="none"), ids))
        assert isinstance(reply, PreparedAnswer), reply
        return reply.begins_after

    end = [inner.token_to_id("</think>")] if family.reasoning else []
    assert begins_after(family.prompt) == end
    assert begins_after(f"{family.prompt}<think>\n\n</think>\n\n") == []


@pytest.mark.parametrize(
    ("reasoning", "variables", "end"),
    [
        ("deepseek_v3", {"thinking": True}, "</think>"),
        ("step3", {}, "</think>"),
        ("deepseek_v3", {}, ""),
        ("granite", {}, None),  # a sentence ends the reasoning, and no single token
    ],
)
def test_tools_that_need_no_form_are_taken_whatever_ends_the_reasoning(
    parsers: Any, reasoning: str, variables: dict[str, bool], end: str | None
) -> None:
    """Some parsers keep their end token under another name, or in an inner parser."""
    from pdmesh.services.gateway.parsing.frames import (
        LoadParsers,
        ParserDone,
        PrepareAnswer,
        PreparedAnswer,
    )

    inner, model = tokenizer_of("qwen3"), f"{reasoning} {variables}"
    load = LoadParsers(model, inner.to_str(), {"eos_token": "<eos>"}, "", "hermes", reasoning)
    assert parsers.handle(load) == ParserDone()
    prompt = array("I", inner.encode("<user>Weather?<assistant>").ids).tobytes()
    request = request_of(FAMILIES["qwen3"], chat_template_kwargs=variables)
    reply = parsers.handle(PrepareAnswer(model, request, prompt))
    assert isinstance(reply, PreparedAnswer), reply
    assert reply.constraint == ""
    assert reply.lacks_end is (end is None)
    assert reply.begins_after == ([inner.token_to_id(end)] if end else [])


@pytest.mark.parametrize("begins_in_prompt", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "deepseek r1"])
def test_reasoning_tokens_are_counted_between_their_marks_streamed_or_not(
    parsers: Any, name: str, begins_in_prompt: bool
) -> None:
    """The tokens are random. Many of them are parts of a character, which add no text by
    themselves.
    """
    from pdmesh.services.gateway.parsing.frames import FeedAnswer, OpenAnswer

    inner, family, rng = tokenizer_of(name), FAMILIES[name], random.Random(7)
    begin, end, eos = map(inner.get_vocab().__getitem__, ("<think>", "</think>", "<eos>"))
    marks = {inner.token_to_id(mark) for mark in family.plain} | {eos}
    others = [i for i in range(inner.get_vocab_size()) if i not in marks]
    prompt = inner.encode("<user>Why?<assistant>").ids + [begin] * begins_in_prompt

    def num_reasoning_tokens(ids: Sequence[int], *, is_whole: bool) -> int:
        data = array("I", prompt).tobytes()
        request = request_of(family, tools=None, tool_choice="none")
        parsers.handle(OpenAnswer(1, name, request, data, is_whole, (), 0, False, False, [eos]))
        return int(parsers.handle(FeedAnswer(1, list(ids), True)).num_reasoning_tokens)

    for is_cut in (False, True):
        for _ in range(20):
            thought = rng.choices(others, k=rng.randint(1, 30))
            answer = [] if is_cut else [end, *rng.choices(others, k=rng.randint(0, 10)), eos]
            ids = [begin] * (not begins_in_prompt) + thought + answer
            found = [num_reasoning_tokens(ids, is_whole=whole) for whole in (False, True)]
            assert found == [len(thought)] * 2


def test_a_thought_that_the_prompt_has_ended_has_no_tokens(parsers: Any) -> None:
    from pdmesh.services.gateway.parsing.frames import FeedAnswer, OpenAnswer

    inner = tokenizer_of("qwen3")
    prompt = array("I", inner.encode("<user>Why?<assistant><think>\n\n</think>\n\n").ids).tobytes()
    request = request_of(FAMILIES["qwen3"], chat_template_kwargs={"enable_thinking": False})
    ids = inner.encode("So it is.").ids
    for is_whole in (False, True):
        parsers.handle(OpenAnswer(1, "qwen3", request, prompt, is_whole, (), 0, False, False, []))
        told = parsers.handle(FeedAnswer(1, ids, True))
        assert told.num_reasoning_tokens == 0
        assert "".join(piece.content for piece in told.pieces) == "So it is."
