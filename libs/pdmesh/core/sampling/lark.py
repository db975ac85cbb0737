"""Writes the rules of a grammar in Lark, as llguidance understands it.

Some texts, such as `<tool_call>`, are one token of the vocabulary. The rules name the token in
place of such a text. Otherwise a model could spell the text with other tokens, and parsers of
answers would not recognise it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

_REFERENCE: Final = "<[{}]>"


class LarkRules:
    """The rules of one grammar, in `lines`. `tokens` has the ids of tokens, by their text."""

    def __init__(self, tokens: Mapping[str, int] | None = None) -> None:
        self.lines: list[str] = []
        self._tokens = {text: token for text, token in (tokens or {}).items() if text}
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._known = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def rule(self, body: str, mark: str = "") -> str:
        """Add a rule and return its name. `mark` is an attribute such as `[lazy]`."""
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{mark}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """Add a terminal and return its name. Only terminals may combine regexes with `&`, `~`."""
        name = f"T{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def literal(self, text: str) -> str:
        """The text in Lark, with tokens in place of their texts. Empty if the text is empty."""
        if not self._tokens:
            return quoted(text)
        parts = (self._token_or_quoted(part) for part in self._known.split(text) if part)
        return " ".join(parts)

    def until(self, terminal: str, end: str) -> str:
        """Add a rule for a text of this terminal up to and including the first `end`."""
        if self.first_token(end):  # the text before it cannot contain this token
            return self.rule(f"{terminal} {self.literal(end)}")
        return self.rule(f"{terminal} {quoted(end)}", "[lazy]")

    def first_token(self, text: str) -> str:
        """The text of the known token with which `text` begins. Empty if there is none."""
        found = self._known.match(text) if self._tokens else None
        return found.group() if found else ""

    def _token_or_quoted(self, part: str) -> str:
        token = self._tokens.get(part)
        return quoted(part) if token is None else _REFERENCE.format(token)


def quoted(text: str) -> str:
    """The text as a string in Lark. Empty if the text is empty.

    Lark does not support JSON's escapes of characters beyond U+FFFF. A text that has such a
    character is written without these escapes.
    """
    return json.dumps(text, ensure_ascii=max(text) <= "\uffff") if text else ""


def regex(pattern: str) -> str:
    """The regular expression in Lark, between slashes."""
    parts: list[str] = []
    is_escaped = False
    for char in pattern:
        if char == "\n":
            parts.append("n" if is_escaped else "\\n")
        else:
            parts.append("\\/" if char == "/" and not is_escaped else char)
        is_escaped = char == "\\" and not is_escaped
    return f"/{''.join(parts)}/"
