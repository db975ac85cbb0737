"""Converts the form of tool calls from vLLM's structural tags to grammars in Lark.

vLLM describes the form as a structural tag of xgrammar, which is a tree of texts, JSON schemas and
repetitions. The mesh's engines use grammars of llguidance instead. If a form cannot be expressed as
a grammar, it is refused. It is never replaced by a looser form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pdmesh.core.sampling.lark import LarkRules, regex
from pdmesh.core.sampling.tool_call_xml import STYLES, NoXmlGrammar, xml_arguments

_MAX_DEPTH: Final = 16
# Arguments that may be anything must still be an object, because tools take nothing else.
_OBJECT: Final = '{"type": "object"}'

# Parsed JSON. Its values are Any, and each function below reads the parts that it needs.
_Node = Mapping[str, Any]


class NoGrammar(ValueError):
    """The form has a part that the grammars cannot express."""


def call_grammar(tag: _Node, tokens: Mapping[str, int] | None = None) -> str:
    """The grammar of `tag`, a structural tag with a format. Raises NoGrammar.

    `tokens` has the ids of tokens that stand for a whole text such as `<tool_call>`, by that text.
    """
    grammar = _Grammar(LarkRules(tokens))
    node = tag.get("format")
    if not isinstance(node, Mapping):
        raise NoGrammar("a structural tag without a format")
    if node.get("type") == "triggered_tags" and not node.get("at_least_one"):
        start = grammar.free_text_with(node)
    else:
        start = grammar.expression(node, 0)
    return "\n".join(["%llguidance {}", f"start: {start}", *grammar.lines, ""])


class _Grammar:
    def __init__(self, rules: LarkRules) -> None:
        self._rules = rules

    @property
    def lines(self) -> list[str]:
        return self._rules.lines

    def expression(self, node: _Node, depth: int) -> str:
        if depth > _MAX_DEPTH:
            raise NoGrammar("nested too deeply")
        write = _WRITERS.get(str(node.get("type")))
        if write is None:
            raise NoGrammar(f"no grammar for {node.get('type')}")
        return write(self, node, depth + 1)

    def free_text_with(self, node: _Node) -> str:
        """The rule for free text in which each trigger begins one of the tags."""
        text = self._text_before(node["triggers"])
        alternatives = []
        for trigger in node["triggers"]:
            begun = [tag for tag in node["tags"] if tag["begin"].startswith(trigger)]
            if not begun:
                continue
            name = self._rules.until(text, trigger)
            rests = [
                self.expression({**tag, "begin": tag["begin"][len(trigger) :]}, 1) for tag in begun
            ]
            alternatives.append(f"{name} {self._rules.rule(' | '.join(rests))}")
        tail = self._rules.rule(text)
        if not alternatives:
            return tail
        tags = self._rules.rule(" | ".join(alternatives))
        return f"{tags} | {tail}" if node.get("stop_after_first") else f"{tags}* {tail}"

    def _text_before(self, triggers: Sequence[str]) -> str:
        """A terminal for any text.

        If a trigger begins with a token of its own, the text may not contain that token's text.
        """
        tokens = {found for trigger in triggers if (found := self._rules.first_token(trigger))}
        others = "".join(f" & ~{regex(f'(?s:.*){re.escape(t)}(?s:.*)')}" for t in sorted(tokens))
        return self._rules.terminal(f"/(.|\\n)*/{others}")

    def constant(self, node: _Node, depth: int) -> str:
        return self._rules.literal(node["value"])

    def schema(self, node: _Node, depth: int) -> str:
        # The other styles are handled in `tag`, because they depend on how the tag ends.
        if node.get("style", "json") != "json":
            raise NoGrammar(f"no grammar for arguments in {node['style']}")
        schema = node["json_schema"]
        return "%json " + (json.dumps(schema) if isinstance(schema, dict) else _OBJECT)

    def pattern(self, node: _Node, depth: int) -> str:
        return self._rules.rule(regex(node["pattern"]))

    def sequence(self, node: _Node, depth: int) -> str:
        return " ".join(self.expression(each, depth) for each in node["elements"])

    def either(self, node: _Node, depth: int) -> str:
        return self._either(node["elements"], depth)

    def tag(self, node: _Node, depth: int) -> str:
        end = node["end"]
        if not isinstance(end, str):
            raise NoGrammar("a tag with several ends")
        begin, content = self._rules.literal(node["begin"]), node["content"]
        if content.get("type") == "json_schema" and content.get("style") in STYLES:
            try:
                rest = xml_arguments(content["json_schema"], content["style"], end, self._rules)
            except NoXmlGrammar as exc:
                raise NoGrammar(str(exc)) from exc
            return self._rules.rule(f"{begin} {rest}")
        parts = (begin, self.expression(content, depth), self._rules.literal(end))
        return self._rules.rule(" ".join(part for part in parts if part))

    def tags(self, node: _Node, depth: int) -> str:
        """The rule for a sequence of these tags."""
        one = self._either(node["tags"], depth)
        separator = self._rules.literal(node.get("separator", ""))
        more = (
            one if node.get("stop_after_first") else self._rules.rule(f"{one} ({separator} {one})*")
        )
        return more if node.get("at_least_one") else self._rules.rule(f"{more} |")

    def times(self, node: _Node, depth: int) -> str:
        sign = {"star": "*", "plus": "+", "optional": "?"}[node["type"]]
        return f"({self.expression(node['content'], depth)}){sign}"

    def _either(self, nodes: Sequence[_Node], depth: int) -> str:
        if not nodes:
            raise NoGrammar("no tag to choose from")
        return self._rules.rule(" | ".join(self.expression(each, depth) for each in nodes))


_WRITERS: Final[Mapping[str, Callable[[_Grammar, _Node, int], str]]] = {
    "const_string": _Grammar.constant,
    "json_schema": _Grammar.schema,
    "regex": _Grammar.pattern,
    "sequence": _Grammar.sequence,
    "or": _Grammar.either,
    "tag": _Grammar.tag,
    "tags_with_separator": _Grammar.tags,
    "triggered_tags": _Grammar.tags,
    "star": _Grammar.times,
    "plus": _Grammar.times,
    "optional": _Grammar.times,
}
