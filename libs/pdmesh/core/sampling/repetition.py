"""Finds where an answer begins to repeat itself, as vLLM's `repetition_detection` defines it.

An answer repeats itself if its last tokens are the same pattern `min_count` times in a row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdmesh.errors import InvalidRequest

MAX_PATTERN: Final = 256  # tokens; the work per token grows with this if one token is repeated
MAX_COUNT: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class RepetitionRule:
    """The patterns to look for. Sizes are in tokens, and a `min_size` of 0 means 1."""

    max_size: int
    min_size: int
    min_count: int

    def check(self) -> None:
        """Raises InvalidRequest with the name of the field."""
        if not 0 < self.max_size <= MAX_PATTERN:
            raise _refusal("max_pattern_size", f"must be between 1 and {MAX_PATTERN}")
        if not 0 <= self.min_size <= self.max_size:
            raise _refusal("min_pattern_size", "must be between 0 and max_pattern_size")
        if not 2 <= self.min_count <= MAX_COUNT:
            raise _refusal("min_count", f"must be between 2 and {MAX_COUNT}")


def repetition_rule(max_size: int, min_size: int, min_count: int) -> RepetitionRule | None:
    """The rule that a client asks for, or None if it asks for none.

    Raises InvalidRequest with the name of the field.
    """
    rule = RepetitionRule(max_size, min_size, min_count)
    if not (max_size or min_size):
        if not 0 <= min_count <= MAX_COUNT:  # refused as a mistake, although it has no effect
            raise _refusal("min_count", f"must be between 0 and {MAX_COUNT}")
        return None
    rule.check()
    return rule


class RepetitionFinder:
    """Finds the rule's patterns in tokens that come one by one.

    It keeps only the last `max_size` tokens, the length of the longest pattern.
    """

    __slots__ = ("_num", "_places", "_recent", "_rule", "_runs")

    def __init__(self, rule: RepetitionRule) -> None:
        self._rule = rule
        self._num = 0
        self._recent: deque[int] = deque()  # the last tokens, at most `max_size`
        self._places: dict[int, deque[int]] = {}  # by token: its positions in `_recent`
        # By distance d: how many of the last tokens equal the token d positions before them.
        self._runs: dict[int, int] = {}

    def feed(self, token_id: int) -> bool:
        """Whether the answer repeats itself with this token."""
        places = self._places.setdefault(token_id, deque())
        at = self._num
        self._runs = {at - place: self._runs.get(at - place, 0) + 1 for place in places}
        self._num += 1
        places.append(at)
        self._recent.append(token_id)
        if len(self._recent) > self._rule.max_size:
            self._forget(self._recent.popleft())
        least, times = self._rule.min_size, self._rule.min_count - 1
        return any(size >= least and run >= size * times for size, run in self._runs.items())

    def _forget(self, token_id: int) -> None:
        places = self._places[token_id]
        places.popleft()
        if not places:
            del self._places[token_id]


class RepeatedEnd:
    """Ends an answer that repeats itself.

    `is_found` stays false if the repeating token ends the answer anyway, because it is one of
    `end_ids` or the last of `max_tokens`. An answer of fewer than `min_tokens` may repeat itself.
    """

    __slots__ = ("_end_ids", "_finder", "_max_tokens", "_min_tokens", "_num", "is_found")

    def __init__(
        self, rule: RepetitionRule, end_ids: frozenset[int], min_tokens: int, max_tokens: int
    ) -> None:
        self._finder = RepetitionFinder(rule)
        self._end_ids = end_ids
        self._min_tokens, self._max_tokens = min_tokens, max_tokens
        self._num = 0
        self.is_found = False

    def feed(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The tokens up to the one that ends the answer, or all of them if none does."""
        if self.is_found:
            return ()
        for at, token_id in enumerate(token_ids, start=1):
            self._num += 1
            is_repeated = self._finder.feed(token_id) and self._num >= self._min_tokens
            if is_repeated and token_id not in self._end_ids and self._num < self._max_tokens:
                self.is_found = True
                return token_ids[:at]
        return token_ids


def _refusal(name: str, what: str) -> InvalidRequest:
    field = f"repetition_detection.{name}"
    return InvalidRequest(f"{field} {what}", field=field)
