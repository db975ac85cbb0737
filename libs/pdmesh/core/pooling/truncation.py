"""Decides which tokens of a text, or of a pair of texts, a pooling model gets. It follows vLLM.

A client may name the side, left or right, on which the input is cut. Special tokens on that side
are also cut off. If the client names no side, special tokens stay, and of two texts the longer one
is cut first, as in tokenizers. If not even the special tokens fit, the input is cut at its end.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Literal

Side = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class TextCut:
    """An input keeps at most `max_tokens` tokens. The rest is cut off on the given `side`."""

    max_tokens: int
    side: Side | None = None


@dataclass(frozen=True, slots=True)
class Content:
    """The tokens of a text that may be needed, without special ones. `length` counts all its
    tokens.
    """

    tokens: array[int]
    length: int


def content_of(tokens: array[int], cut: TextCut | None) -> Content:
    """The text without the tokens that are cut off in any case."""
    if cut is None or len(tokens) <= cut.max_tokens:
        return Content(tokens, len(tokens))
    is_end = cut.side == "left"
    kept = tokens[-cut.max_tokens :] if is_end else tokens[: cut.max_tokens]
    return Content(kept, len(tokens))


def _none() -> array[int]:
    return array("I")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The special tokens of an input of one or two texts.

    `types` has one number for each part of the input, in this order: each token of `before`, the
    first text, each token of `between`, the second text, each token of `after`. The number says to
    which text the part belongs, 0 or 1. `types` is empty if the model does not distinguish the
    texts.
    """

    before: array[int] = field(default_factory=_none)
    between: array[int] = field(default_factory=_none)
    after: array[int] = field(default_factory=_none)
    types: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two texts as one input. `first_length` is the number of tokens before the second text.

    If the tokenizer does not distinguish the texts, `first_length` is the number of all tokens.
    """

    tokens: array[int]
    first_length: int


def lengths_within(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of each text are kept if the longer one is cut first."""
    if first + second <= room:
        return first, second
    shorter, longer = sorted((first, second))
    longer = shorter if shorter > room else max(shorter, room - shorter)
    if shorter + longer > room:
        shorter = room // 2
        longer = shorter + room % 2
    return (shorter, longer) if first <= second else (longer, shorter)


def input_length(num_tokens: int, special: SpecialTokens, cut: TextCut | None) -> int:
    """The length of an input whose texts have `num_tokens` tokens."""
    length = num_tokens + len(special)
    return length if cut is None else min(length, cut.max_tokens)


def one_text(content: Content, special: SpecialTokens, cut: TextCut | None) -> array[int]:
    """The input of one text."""
    tokens = content.tokens
    if cut is not None and cut.side is None and (room := cut.max_tokens - len(special)) >= 0:
        tokens = tokens[:room]
    whole = special.before + tokens + special.after
    start, end = _kept(len(whole), cut)
    return whole[start:end]


def two_texts(
    first: Content,
    second: Content,
    special: SpecialTokens,
    cut: TextCut | None,
    *,
    cuts_second: bool = False,
) -> Pair | None:
    """The input of a pair of texts.

    With `cuts_second`, only the second text loses tokens. The result is None if the first text
    leaves no room for the second.
    """
    one, other = first.tokens, second.tokens
    if cut is not None and cut.side is None and (room := cut.max_tokens - len(special)) >= 0:
        kept = lengths_within(first.length, second.length, room)
        if cuts_second and room and first.length + second.length > room:
            if first.length >= room:
                return None
            kept = first.length, room - first.length
        one, other = one[: kept[0]], other[: kept[1]]
    whole = special.before + one + special.between + other + special.after
    start, end = _kept(len(whole), cut)
    begin = _second_at(special, len(one), len(other), start)
    return Pair(whole[start:end], min(max(0, begin - start), end - start))


def _kept(length: int, cut: TextCut | None) -> tuple[int, int]:
    if cut is None or length <= cut.max_tokens:
        return 0, length
    return (length - cut.max_tokens, length) if cut.side == "left" else (0, cut.max_tokens)


def _second_at(special: SpecialTokens, first: int, second: int, start: int) -> int:
    """The position of the second text's first part that ends after `start`, or else the end."""
    sizes = [
        *[1] * len(special.before),
        first,
        *[1] * len(special.between),
        second,
        *[1] * len(special.after),
    ]
    place = 0
    for size, type_ in zip(sizes, special.types or [0] * len(sizes), strict=True):
        if type_ == 1 and place + size > start and size:
            return place
        place += size
    return place
