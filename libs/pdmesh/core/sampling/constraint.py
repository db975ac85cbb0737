"""The form that an answer must have, and the token at which that form begins.

A constraint holds for the whole answer, whichever engines draw its tokens. An engine that continues
an answer first passes its matcher the tokens that other engines drew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.sampling.grammar_limits import MAX_GRAMMAR_BYTES
from pdmesh.errors import InvalidRequest

MAX_MARKER: Final = 16  # tokens


@dataclass(frozen=True, slots=True)
class Constraint:
    """`grammar` is in llguidance's form. The gateway has checked it.

    The grammar begins after the token ids `begins_after`, which end the reasoning. If they are
    empty, it begins with the first token of the answer. `asked_by` is the client's field, which
    only gateways know.
    """

    grammar: str
    begins_after: tuple[int, ...] = ()
    asked_by: str = field(default="constraint", compare=False)

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
    """Separates the tokens before the beginning of a constraint from those that it applies to."""

    __slots__ = ("_before", "_marker", "_num_after", "has_begun")

    def __init__(self, marker: Sequence[int]) -> None:
        self._marker = list(marker)
        self._before: list[int] = []
        self._num_after = 0
        self.has_begun = not self._marker

    def after(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The part of the answer's next tokens that the constraint applies to."""
        num_before = 0
        while not self.has_begun and num_before < len(token_ids):
            self._before.append(token_ids[num_before])
            num_before += 1
            self.has_begun = self._before[-len(self._marker) :] == self._marker
        self._num_after += len(token_ids) - num_before
        return token_ids[num_before:] if num_before else token_ids

    def take_back(self, num_tokens: int) -> int:
        """Forget the last tokens. Return how many of them the constraint applied to."""
        num_after = min(num_tokens, self._num_after)
        self._num_after -= num_after
        if num_before := num_tokens - num_after:
            del self._before[-num_before:]
            self.has_begun = False
        return num_after
