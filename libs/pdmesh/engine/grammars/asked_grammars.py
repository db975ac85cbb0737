"""Turns the output formats that clients ask for into grammars for llguidance.

Clients may use the kinds of vLLM's `structured_outputs`, such as a JSON schema. The kind `calls`
is the mesh's own, for tool calls. A structural tag is a format for free text with structures in it.
A structure is the text `begin`, JSON under a schema, and the text `end`. The text `begin` must
start with one of the format's triggers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from pdmesh.core.sampling.lark import quoted
from pdmesh.core.sampling.tool_call_grammar import call_grammar
from pdmesh.engine.grammars.compiler import GrammarRefused

MAX_CHOICES: Final = 10_000


class GrammarKind(StrEnum):
    JSON_OBJECT = "json_object"
    JSON = "json"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"
    CALLS = "calls"  # the form of tool calls, as vLLM's parser of the model describes it


@dataclass(frozen=True, slots=True)
class AskedGrammar:
    """The form of an answer that a client asks for.

    `text` is a JSON schema, a regular expression, a grammar in GBNF or Lark, a JSON list of
    choices, a structural tag in JSON, or the form of tool calls in JSON. `field` is the field of
    the request that asks for the grammar. Errors name this field.
    """

    kind: GrammarKind
    text: str = ""
    field: str = "response_format"
    has_any_whitespace: bool = True  # whether whitespace is allowed between the parts of JSON


def grammar_of(asked: AskedGrammar, tokens: Mapping[str, int] | None = None) -> str:
    """Make the grammar's text, without compiling it. Raises GrammarRefused.

    `tokens` has the ids of the tokenizer's added tokens, such as `<tool_call>`, by text.
    """
    from llguidance import grammar_from

    try:
        match asked.kind:
            case GrammarKind.JSON_OBJECT:
                return _json_grammar('{"type": "object"}', asked.has_any_whitespace)
            case GrammarKind.JSON:
                return _json_grammar(asked.text, asked.has_any_whitespace)
            case GrammarKind.CHOICE:
                return _choice_grammar(_choices(json.loads(asked.text)))
            case GrammarKind.STRUCTURAL_TAG:
                return _tags(json.loads(asked.text))
            case GrammarKind.CALLS:
                return call_grammar(json.loads(asked.text), tokens)
            case GrammarKind.REGEX:
                return grammar_from("regex", asked.text)
            case GrammarKind.GRAMMAR:
                return grammar_from("grammar", asked.text)
    except RecursionError:
        raise GrammarRefused("it is nested too deeply") from None
    except ValueError as exc:
        raise GrammarRefused(str(exc)[:300]) from None


def _json_grammar(schema: str, has_any_whitespace: bool) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(
        schema, defaults={"whitespace_flexible": has_any_whitespace}
    )


# The type is Any because a client wrote this JSON.
def _choices(choices: Any) -> list[str]:
    if not isinstance(choices, list) or not all(isinstance(each, str) for each in choices):
        raise GrammarRefused("choice must be a list of strings")
    if not 0 < len(choices) <= MAX_CHOICES:
        raise GrammarRefused(f"choice must have 1 to {MAX_CHOICES} entries")
    return choices


def _choice_grammar(choices: list[str]) -> str:
    """A grammar with all choices in one terminal.

    The parser would fail on a rule with thousands of alternatives.
    """
    texts = [quoted(text) for text in dict.fromkeys(choices) if text]
    if not texts:
        return 'start: ""'
    start = "CHOICE?" if "" in choices else "CHOICE"
    return f"start: {start}\nCHOICE: {' | '.join(texts)}"


def _tags(tag: Any) -> str:
    from llguidance import StructTag

    if not isinstance(tag, dict) or "structures" not in tag or "triggers" not in tag:
        raise GrammarRefused(
            "a structural tag must have triggers and structures; format is not supported"
        )
    triggers, structures = tag["triggers"], tag["structures"]
    if not (isinstance(triggers, list) and isinstance(structures, list) and structures):
        raise GrammarRefused("triggers and structures must be lists, and structures not empty")
    tags = []
    for at, structure in enumerate(structures):
        where = f"structures[{at}]"
        if not isinstance(structure, dict):
            raise GrammarRefused(f"{where} must be an object")
        begin, end, schema = (structure.get(name) for name in ("begin", "end", "schema"))
        if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict):
            raise GrammarRefused(f"{where} must have begin and end, which are text, and a schema")
        trigger = next(
            (t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), ""
        )
        if not trigger:
            raise GrammarRefused(f"the begin of {where} must start with one of the triggers")
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=end))
    return StructTag.to_grammar(tags, assume_special=False)
