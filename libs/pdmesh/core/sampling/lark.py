"""Rules of a grammar in llguidance's Lark, as they are written.

A text that is one token of the vocabulary, such as `<tool_call>`, is written as this token: parsers
do not recognise the text if a model spells it with other tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

_REFERENCE: Final = "<[{}]>"


class LarkRules:
    """`lines`: the rules so far. `tokens`: ids of the tokens that stand for a text, by the text."""

    def __init__(self, tokens: Mapping[str, int] | None = None) -> None:
        self.lines: list[str] = []
        self._tokens = {text: token for text, token in (tokens or {}).items() if text}
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._known = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def rule(self, body: str, mark: str = "") -> str:
        """Returns the name of the new rule. `mark`: for example `[lazy]`."""
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{mark}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """Returns the name. Only terminals combine regular expressions with `&` and `~`."""
        name = f"T{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def literal(self, text: str) -> str:
        """The text in Lark, with known tokens in place of their texts; empty for an empty text."""
        if not self._tokens:
            return quoted(text)
        parts = (self._token_or_quoted(part) for part in self._known.split(text) if part)
        return " ".join(parts)

    def until(self, terminal: str, end: str) -> str:
        """A rule for a text of this terminal up to its first `end`, which is included."""
        if self.first_token(end):  # no text contains this token
            return self.rule(f"{terminal} {self.literal(end)}")
        return self.rule(f"{terminal} {quoted(end)}", "[lazy]")

    def first_token(self, text: str) -> str:
        """The text of the known token that `text` begins with; empty if there is none."""
        found = self._known.match(text) if self._tokens else None
        return found.group() if found else ""

    def _token_or_quoted(self, part: str) -> str:
        token = self._tokens.get(part)
        return quoted(part) if token is None else _REFERENCE.format(token)


def quoted(text: str) -> str:
    """The text as a string of Lark; empty for an empty text.

    Lark does not know JSON's escapes of characters beyond U+FFFF, so a text with such characters is
    written without these escapes.
    """
    return json.dumps(text, ensure_ascii=max(text) <= "\uffff") if text else ""


def regex(pattern: str) -> str:
    """A regular expression between slashes."""
    parts: list[str] = []
    is_escaped = False
    for char in pattern:
        if char == "\n":
            parts.append("n" if is_escaped else "\\n")
        else:
            parts.append("\\/" if char == "/" and not is_escaped else char)
        is_escaped = char == "\\" and not is_escaped
    return f"/{''.join(parts)}/"
