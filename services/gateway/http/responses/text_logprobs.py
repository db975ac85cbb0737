"""Which log probabilities of a parsed answer are those of its text.

The parsers say what the reasoning, the text and the calls are, but not which tokens make them up.
So the text is searched for in the bytes of the last tokens, after those of the reasoning and before
those of the calls.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Final

from pdmesh.services.gateway.text.choice_text import TextDelta

# The most tokens to keep that gave no text yet: parts of a character, or a possible beginning of a
# mark.
_MAX_HELD: Final = 64

# Any: JSON objects on their way out.
Json = dict[str, Any]


class TextLogprobs:
    """The log probabilities of one choice's text, in the form of `LogprobWriter.chat`."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: list[Json] = []

    def of(self, delta: TextDelta, logprobs: list[Json]) -> list[Json]:
        """The part of the log probabilities that is of `delta.text`.

        `logprobs`: those of all tokens since the last call.
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
    """The range of the tokens that contain this text, or else the last tokens of its length.

    If the text occurs several times, its last place is used. With `is_first` other text follows
    that may repeat it, so its first place is used, if possible at the beginning of a token.
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
