"""Tool calls that a grammar allows can be read by vLLM's parser of the same model family.

Random answers within the grammar become calls that are valid by the schemas of their tools.
"""

from __future__ import annotations

import json
import os
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pdmesh.core.sampling.tool_call_grammar import call_grammar
from pdmesh.engine.grammars.vocabulary import added_tokens, vocabulary_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("vllm")
jsonschema = pytest.importorskip("jsonschema")
llguidance = pytest.importorskip("llguidance")
pytestmark = pytest.mark.filterwarnings("ignore")  # importing vLLM raises warnings

_DSML: Final = "\uff5cDSML\uff5c"


@dataclass(frozen=True)
class Family:
    """`marks` end a value, a call, or all calls. `tokens` are texts that are single tokens."""

    parser: str
    marks: tuple[str, ...]
    tokens: tuple[str, ...] = ("<tool_call>", "</tool_call>")


_LINES: Final = ("\n</parameter>\n", "</function>\n</tool_call>")
_MINIMAX: Final = ("<minimax:tool_call>", "</minimax:tool_call>")
_GLM: Final = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
FAMILIES: Final = {
    "qwen3 coder": Family("qwen3_coder", _LINES),
    "step3p5": Family("step3p5", _LINES),
    "mimo": Family("mimo", ("</parameter>", "</function></tool_call>")),
    "minimax m2": Family("minimax_m2", ("</parameter>\n", "</invoke>\n", _MINIMAX[1]), _MINIMAX),
    "deepseek v3.2": Family(
        "deepseek_v32",
        (f"</{_DSML}parameter>\n", f"</{_DSML}invoke>\n", f"</{_DSML}function_calls>"),
        (_DSML,),
    ),
    "deepseek v4": Family(
        "deepseek_v4",
        (f"</{_DSML}parameter>\n", f"</{_DSML}invoke>\n", f"</{_DSML}tool_calls>"),
        (_DSML, "<think>", "</think>"),
    ),
    "deepseek v4.1": Family(
        "deepseek_v41",
        (f"</{_DSML} parameter>\n", f"</{_DSML} invoke>\n", f"</{_DSML} calls>"),
        (_DSML, "<think>", "</think>"),
    ),
    "glm 4.5": Family(
        "glm45", ("</arg_value>", "</tool_call>"), ("<tool_call>", "</tool_call>", *_GLM)
    ),
}
# `tools` draws the parameters of each tool from these. A parameter may be required or not.
PARAMETERS: Final[dict[str, Any]] = {
    "text": {"type": "string"},
    "short": {"type": "string", "minLength": 1, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[a-z]{2}/[0-9]+$"},
    "found": {"type": "string", "pattern": "(ab|cd)"},
    "date": {"type": "string", "format": "date-time"},
    "unit": {"type": "string", "enum": ["c", "celsius", "\u00b0F", "\U0001f327", ""]},
    "bare_enum": {"enum": ["1", "b"]},
    "const": {"type": "string", "const": "x > y"},
    "named": {"$ref": "#/$defs/Unit"},
    "maybe": {"type": ["string", "null"]},
    "maybe_short": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
    "maybe_unit": {"type": ["string", "null"], "enum": ["c", None]},
    "any": {},
    "mixed": {"type": ["string", "integer", "boolean"]},
    "count": {"type": "integer"},
    "few": {"type": "integer", "minimum": 3, "maximum": 12},
    "ratio": {"type": "number"},
    "is_so": {"type": "boolean"},
    "nothing": {"type": "null"},
    "level": {"enum": [1, 2, 10]},
    "count_or_not": {"type": ["integer", "null"]},
    "towns": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
    "place": {
        "type": "object",
        "properties": {"at": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
                       "as": {"type": "string", "maxLength": 5}},
        "required": ["at"],
        "additionalProperties": False,
    },
}  # fmt: skip


def tool(name: str, properties: dict[str, Any], *, required: Sequence[str] = ()) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
        "$defs": {"Unit": {"type": "string", "enum": ["kg", "lb"], "title": "Unit"}},
    }
    return {
        "type": "function",
        "function": {"name": name, "strict": True, "parameters": parameters},
    }


def tools(rng: random.Random) -> list[dict[str, Any]]:
    """Tools with up to four random parameters, and one tool without parameters."""
    made = [tool("nothing", {})]
    for number in range(3):
        names = rng.sample(list(PARAMETERS), rng.randint(1, 4))
        required = [name for name in names if rng.random() < 0.6]
        properties = {name: PARAMETERS[name] for name in names}
        made.append(tool(f"tool_{number}", properties, required=required))
    return made


@cache
def tokenizer_of(name: str) -> Tokenizer:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator(list(FAMILIES[name].marks) * 3, trainer)
    inner.add_special_tokens(["<eos>"])
    inner.add_tokens(list(FAMILIES[name].tokens))
    return inner


@pytest.fixture(scope="module")
def parsers() -> Any:
    from pdmesh.services.gateway.parsing.frames import LoadParsers, ParserDone
    from pdmesh.services.gateway.parsing.parser_requests import ParserRequests

    made = ParserRequests(max_models=len(FAMILIES))
    for name, family in FAMILIES.items():
        text = tokenizer_of(name).to_str()
        load = LoadParsers(name, text, {"eos_token": "<eos>"}, "", family.parser, "")
        assert made.handle(load) == ParserDone(), name
    return made


def request_of(offered: list[dict[str, Any]], choice: Any) -> bytes:
    messages = [{"role": "user", "content": ""}]
    given = {"model": "m", "messages": messages, "tools": offered, "tool_choice": choice}
    return json.dumps(given).encode()


def grammar_of(parsers: Any, name: str, request: bytes) -> str:
    from pdmesh.services.gateway.parsing.frames import PrepareAnswer, PreparedAnswer

    prepared = parsers.handle(PrepareAnswer(name, request))
    assert isinstance(prepared, PreparedAnswer), prepared
    tag = json.loads(json.loads(prepared.constraint)["structural_tag"])
    return call_grammar(tag, added_tokens(tokenizer_of(name).to_str()))


def answers(name: str, grammar: str, rng: random.Random, num: int) -> Iterator[list[int]]:
    """Random answers within the grammar. The random model often draws the end of what it has
    begun.
    """
    inner = tokenizer_of(name)
    size, eos = inner.get_vocab_size(), inner.get_vocab()["<eos>"]
    start = llguidance.LLMatcher(vocabulary_of(inner.to_str(), size, eos), grammar, log_level=0)
    assert not start.is_error(), (start.get_error(), grammar)
    marks = [inner.encode(mark, add_special_tokens=False).ids for mark in FAMILIES[name].marks]
    for _ in range(num):
        matcher, ids = start.deep_copy(), list[int]()
        while len(ids) < 400:
            if matcher.is_accepting() and (matcher.is_stopped() or rng.random() < 0.7):
                yield [*ids, eos]
                break
            drawn = rng.choice(marks) if rng.random() < 0.4 else []
            if not drawn or matcher.validate_tokens(drawn) < len(drawn):
                mask = matcher.compute_logit_bias()
                drawn = [rng.choice([i for i in range(size) if mask[i] and i != eos])]
            assert matcher.consume_tokens(drawn), matcher.get_error()
            ids += drawn


def calls_in(
    parsers: Any, name: str, request: bytes, ids: list[int], *, is_whole: bool
) -> list[Any]:
    from pdmesh.services.gateway.parsing.frames import FeedAnswer, OpenAnswer, ParsedTokens

    prompt = array("I", tokenizer_of(name).encode("Weather?").ids).tobytes()
    parsers.handle(OpenAnswer(1, name, request, prompt, is_whole, (), 0, False, True, ids[-1:]))
    reply = parsers.handle(FeedAnswer(1, ids, True))
    assert isinstance(reply, ParsedTokens), reply
    found: dict[int, list[str]] = {}
    for piece in reply.pieces:
        for call in piece.calls:
            told = found.setdefault(call.index, ["", ""])
            told[0] += call.name
            told[1] += call.arguments
    return [(called, json.loads(arguments)) for called, arguments in found.values()]


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_within_the_grammar_read_back_as_valid_calls(parsers: Any, name: str) -> None:
    rng, num_read, seen = random.Random(name), 0, set[str]()
    for _ in range(8):
        offered = tools(rng)
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in offered}
        request = request_of(offered, "required")
        for ids in answers(name, grammar_of(parsers, name, request), rng, 5):
            text = tokenizer_of(name).decode(ids)
            for is_whole in (False, True):
                calls = calls_in(parsers, name, request, ids, is_whole=is_whole)
                assert calls, (text, ids, is_whole)
                for called, arguments in calls:
                    jsonschema.validate(arguments, schemas[called])
                    seen |= arguments.keys()
            num_read += 1
    assert num_read > 20
    assert len(seen) > 7, "many kinds of parameters were drawn"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_named_tool_is_called_once_and_no_other(parsers: Any, name: str) -> None:
    rng = random.Random(name)
    offered = tools(rng)
    request = request_of(offered, {"type": "function", "function": {"name": "tool_1"}})
    num_read = 0
    for ids in answers(name, grammar_of(parsers, name, request), rng, 6):
        for is_whole in (False, True):
            calls = calls_in(parsers, name, request, ids, is_whole=is_whole)
            assert [called for called, _ in calls] == ["tool_1"]
            jsonschema.validate(calls[0][1], offered[2]["function"]["parameters"])
        num_read += 1
    assert num_read > 2


@pytest.mark.parametrize("name", FAMILIES)
def test_text_may_come_before_calls_that_are_strict(parsers: Any, name: str) -> None:
    """With `auto`, the model may write any text before its calls. The calls must fit the schema."""
    rng = random.Random(name)
    offered = [tool("few", {"few": PARAMETERS["few"]}, required=["few"])]
    request = request_of(offered, "auto")
    inner, grammar = tokenizer_of(name), grammar_of(parsers, name, request)
    eos = inner.get_vocab()["<eos>"]
    vocabulary = vocabulary_of(inner.to_str(), inner.get_vocab_size(), eos)
    required = grammar_of(parsers, name, request_of(offered, "required"))
    called = next(answers(name, required, rng, 50))
    free = inner.encode("Let me look. ").ids
    for ids in ([*free, eos], called, [*free, *called]):
        matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
        assert matcher.consume_tokens(ids), matcher.get_error()
    assert calls_in(parsers, name, request, [*free, *called], is_whole=False)
