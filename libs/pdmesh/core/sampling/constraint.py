"""What an answer must look like, and at which of its tokens that begins.

A constraint holds for the whole answer, whichever engines draw its tokens. An engine that goes on
with an answer first gives its matcher the tokens that were drawn elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdmesh.errors import InvalidRequest

MAX_GRAMMAR_BYTES: Final = 256 << 10
MAX_MARKER: Final = 16  # tokens


@dataclass(frozen=True, slots=True)
class Constraint:
    """`grammar` is in llguidance's form, as the gateway checked it.

    The grammar begins after the token ids `begins_after`: the end of the reasoning. Empty: with the
    first token of the answer.
    """

    grammar: str
    begins_after: tuple[int, ...] = ()

    def check(self) -> None:
        """Raises InvalidRequest with the field."""
        if not self.grammar:
            raise InvalidRequest("constraint has no grammar", field="constraint.grammar")
        if len(self.grammar.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
            message = f"the grammar is longer than {MAX_GRAMMAR_BYTES} bytes"
            raise InvalidRequest(message, field="constraint.grammar")
        if len(self.begins_after) > MAX_MARKER:
            message = f"at most {MAX_MARKER} tokens"
            raise InvalidRequest(message, field="constraint.begins_after")


class ConstraintStart:
    """Tells the tokens before the beginning of a constraint from those that it is about."""

    __slots__ = ("_before", "_marker", "_num_after", "has_begun")

    def __init__(self, marker: Sequence[int]) -> None:
        self._marker = list(marker)
        self._before: list[int] = []
        self._num_after = 0
        self.has_begun = not self._marker

    def after(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Those of the answer's next tokens that the constraint is about."""
        num_before = 0
        while not self.has_begun and num_before < len(token_ids):
            self._before.append(token_ids[num_before])
            num_before += 1
            self.has_begun = self._before[-len(self._marker) :] == self._marker
        self._num_after += len(token_ids) - num_before
        return token_ids[num_before:] if num_before else token_ids

    def take_back(self, num_tokens: int) -> int:
        """Forget the last tokens; returns how many of them the constraint was about."""
        num_after = min(num_tokens, self._num_after)
        self._num_after -= num_after
        if num_before := num_tokens - num_after:
            del self._before[-num_before:]
            self.has_begun = False
        return num_after
