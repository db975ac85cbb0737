"""Finds the log probabilities that belong to the text of a parsed answer.

A parser splits an answer into reasoning, text and tool calls, but does not say which tokens belong
to which. So this module searches for the text in the bytes of the last tokens, after the bytes of
the reasoning and before the bytes of the tool calls.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Final

from pdmesh.services.gateway.text.choice_text import TextDelta

# The most tokens to keep that have given no text yet. Such a token is part of a character, or may
# begin a marker of the reasoning or of a tool call.
_MAX_HELD: Final = 64

# A JSON object to be encoded, with values of any type.
Json = dict[str, Any]


class TextLogprobs:
    """The log probabilities of one answer's text, in the form of `LogprobWriter.chat`."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: list[Json] = []

    def of(self, delta: TextDelta, logprobs: list[Json]) -> list[Json]:
        """The log probabilities of the tokens of `delta.text`.

        `logprobs` has the log probabilities of all tokens since the previous delta.
        """
        self._held += logprobs
        found: list[Json] = []
        if delta.text:
            if delta.reasoning:
                self._taken(delta.reasoning, is_first=True)
            found = self._taken(delta.text, is_first=bool(delta.calls))
        del self._held[:-_MAX_HELD]
        return found

    def _taken(self, text: str, *, is_first: bool) -> list[Json]:
        tokens = [bytes(each["bytes"]) for each in self._held]
        begin, end = _place(text.encode(), tokens, is_first=is_first)
        found = self._held[begin:end]
        del self._held[:end]
        return found


def _place(text: bytes, tokens: list[bytes], *, is_first: bool) -> tuple[int, int]:
    """The range of the tokens that contain this text.

    If no tokens contain it, this is the range of the last tokens that have as many bytes. If the
    text occurs several times, the last occurrence is used. With `is_first`, other text follows,
    which may repeat this text. So the first occurrence is used, preferably the first that begins
    with a token.
    """
    whole = b"".join(tokens)
    ends = list(accumulate(map(len, tokens)))
    at = whole.rfind(text)
    if at >= 0 and is_first:
        begins = (0, *ends)
        at = next((b for b in begins if whole.startswith(text, b)), whole.find(text))
    if at < 0:
        at = max(0, len(whole) - len(text))
    begin = next((i for i, end in enumerate(ends) if end > at), len(tokens))
    last = next((i for i, end in enumerate(ends) if end >= at + len(text)), len(tokens) - 1)
    return begin, last + 1
