"""Grammars that grow without bound are refused, and equal grammars are compiled once."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from pdmesh.engine.grammars.asked_grammars import AskedGrammar, GrammarKind, grammar_of
from pdmesh.engine.grammars.compiler import MAX_KEPT, GrammarCompiler, GrammarRefused
from pdmesh.engine.sim.constraints.tokenizer import sim_vocabulary

RECURSIVE = {
    "$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}}},
    "$ref": "#/$defs/n",
}
COMPILER = GrammarCompiler(sim_vocabulary)


def compiled(kind: GrammarKind, text: str) -> None:
    COMPILER.matcher(grammar_of(AskedGrammar(kind, text)))


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"$ref": "http://localhost:1/x"},
        {"$ref": "file:///etc/passwd"},
        {"allOf": [{"$ref": "#"}, {"type": "object"}]},
        {"type": "strin"},
        {"not": {"type": "string"}},
        nested(300),
    ],
)
def test_schemas_that_no_answer_could_match_are_refused(schema: Any) -> None:
    with pytest.raises(GrammarRefused):
        compiled(GrammarKind.JSON, json.dumps(schema))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.REGEX, "(?=a)b"),
        (GrammarKind.REGEX, "("),
        (GrammarKind.GRAMMAR, "root ::= root"),
        (GrammarKind.GRAMMAR, 'start: "a" missing'),
        (GrammarKind.CHOICE, "[]"),
        (GrammarKind.CHOICE, '["a", 1]'),
        (GrammarKind.JSON, "true"),
        (GrammarKind.STRUCTURAL_TAG, '{"format": {}}'),
        (GrammarKind.STRUCTURAL_TAG, '{"triggers": ["<g"], "structures": [{"begin": "<f"}]}'),
    ],
)
def test_meaningless_or_endless_grammars_are_refused_too(kind: GrammarKind, text: str) -> None:
    with pytest.raises(GrammarRefused) as caught:
        compiled(kind, text)
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.REGEX, "(x+x+)+y"),  # takes exponential time in a matcher that backtracks
        (GrammarKind.REGEX, "(.*a){20}"),
        (GrammarKind.REGEX, "((a{1000}){1000}){1000}"),
        (GrammarKind.JSON, json.dumps(nested(60))),
        (GrammarKind.JSON, json.dumps(RECURSIVE)),
        (GrammarKind.GRAMMAR, 'root ::= root root | "a"'),
        (GrammarKind.CHOICE, '["yes", "a\\u0001\\"b"]'),
        (GrammarKind.JSON_OBJECT, ""),
    ],
)  # fmt: skip
def test_a_grammar_that_only_looks_hostile_compiles(kind: GrammarKind, text: str) -> None:
    compiled(kind, text)


@pytest.mark.parametrize("choices", [[f"abcd{n}" for n in range(9000)], ["", "a", "ab"], [""]])
def test_an_answer_is_one_of_many_choices(choices: list[str]) -> None:
    """If each choice were an alternative of a rule, two thousand choices would fail at the first
    token.
    """
    grammar = grammar_of(AskedGrammar(GrammarKind.CHOICE, json.dumps(choices)))
    matcher = COMPILER.matcher(grammar)
    vocabulary, text = COMPILER.vocabulary, choices[-1]
    for token in vocabulary.tokenize_str(text):
        assert matcher.consume_token(token), matcher.get_error()
    assert matcher.is_accepting()
    assert not matcher.is_error()


def test_an_equal_grammar_is_not_compiled_again() -> None:
    compiler = GrammarCompiler(lambda: COMPILER.vocabulary)
    names = {f"p{n}": {"type": "string"} for n in range(300)}
    grammar = grammar_of(AskedGrammar(GrammarKind.JSON, json.dumps({"properties": names})))
    began = time.perf_counter()
    first = compiler.matcher(grammar)
    compiling = time.perf_counter() - began
    began = time.perf_counter()
    copies = [compiler.matcher(grammar) for _ in range(10)]
    assert time.perf_counter() - began < compiling
    assert first.consume_token(COMPILER.vocabulary.tokenize_str("{")[0])
    assert copies[0].compute_bitmask() != first.compute_bitmask(), "each matcher has its own state"
    for number in range(2 * MAX_KEPT):
        compiler.matcher(grammar_of(AskedGrammar(GrammarKind.REGEX, f"a{number}")))
    assert len(compiler._kept) == MAX_KEPT
