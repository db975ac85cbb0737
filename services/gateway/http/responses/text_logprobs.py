"""Which log probabilities of a parsed answer are those of its text.

The parsers say what the reasoning, the text and the calls are, but not which tokens make them up.
So the text is searched for in the bytes of the last tokens. Reasoning comes before it, and calls
after it.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Final

# Tokens without text that may belong to later text: parts of a character, or what could have begun
# a mark.
_MAX_HELD: Final = 64

# Any: JSON objects on their way out.
Json = dict[str, Any]


class TextLogprobs:
    """Those of one choice, in the form of `LogprobWriter.chat`."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: list[Json] = []

    def of(self, text: str, logprobs: list[Json]) -> list[Json]:
        """The log probabilities of `text`. `logprobs`: of all tokens since the last call."""
        self._held += logprobs
        if not text:
            del self._held[:-_MAX_HELD]
            return []
        begin, end = _place(text.encode(), [bytes(each["bytes"]) for each in self._held])
        found = self._held[begin:end]
        del self._held[:end]
        return found


def _place(text: bytes, tokens: list[bytes]) -> tuple[int, int]:
    """The range of the tokens that have this text; if none have, the last ones of its length."""
    whole = b"".join(tokens)
    at = whole.rfind(text)
    if at < 0:
        at = max(0, len(whole) - len(text))
    ends = list(accumulate(map(len, tokens)))
    begin = next((i for i, end in enumerate(ends) if end > at), len(tokens))
    last = next((i for i, end in enumerate(ends) if end >= at + len(text)), len(tokens) - 1)
    return begin, last + 1
