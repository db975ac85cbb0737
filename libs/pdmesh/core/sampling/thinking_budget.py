"""How many tokens of an answer may be reasoning, and which tokens mark its beginning and end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdmesh.core.sampling.constraint import MAX_MARKER
from pdmesh.errors import InvalidRequest

MAX_BUDGET: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The token ids that mark the beginning and the end of the reasoning."""

    begin: tuple[int, ...]
    end: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """The longest reasoning.

    As in vLLM, the end mark follows the begin mark after at most `num_tokens` tokens. If the begin
    mark is in the prompt, the prompt's tokens after it are counted as well.
    """

    num_tokens: int
    marks: ThinkingMarks

    def check(self, vocab_size: int) -> None:
        """Raises InvalidRequest with the name of the field."""
        if not 0 <= self.num_tokens <= MAX_BUDGET:
            raise _refusal(f"must be between 0 and {MAX_BUDGET}")
        for mark in (self.marks.begin, self.marks.end):
            if not 0 < len(mark) <= MAX_MARKER:
                raise _refusal(f"needs marks of 1 to {MAX_MARKER} tokens")
            if not 0 <= min(mark) <= max(mark) < vocab_size:
                raise _refusal(f"has a mark with a token id outside 0 to {vocab_size - 1}")


def _refusal(what: str) -> InvalidRequest:
    field = "thinking_token_budget"
    return InvalidRequest(f"{field} {what}", field=field)
