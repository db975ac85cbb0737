"""The form that an answer must have, and the tokens after which this form begins.

If several engines draw an answer's tokens one after another, the constraint applies to all of them.
An engine that continues an answer first feeds the earlier engines' tokens to its grammar matcher.
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
    """A form of an answer. `grammar` is in llguidance's syntax, and the gateway has checked it.

    The grammar begins after the token ids `begins_after`, which end the reasoning. If
    `begins_after` is empty, the grammar begins with the first token of the answer. `asked_by` names
    the client's field, which only gateways know.
    """

    grammar: str
    begins_after: tuple[int, ...] = ()
    asked_by: str = field(default="constraint", compare=False)

    def check(self) -> None:
        """Raises InvalidRequest with the name of the field."""
        if not self.grammar:
            raise InvalidRequest("constraint has no grammar", field="constraint.grammar")
        if len(self.grammar.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
            message = f"the grammar is longer than {MAX_GRAMMAR_BYTES} bytes"
            raise InvalidRequest(message, field="constraint.grammar")
        if len(self.begins_after) > MAX_MARKER:
            message = f"at most {MAX_MARKER} tokens"
            raise InvalidRequest(message, field="constraint.begins_after")


class ConstraintStart:
    """Finds where a constraint begins in an answer, and passes on the tokens after that."""

    __slots__ = ("_before", "_marker", "_num_after", "has_begun")

    def __init__(self, marker: Sequence[int]) -> None:
        self._marker = list(marker)
        self._before: list[int] = []
        self._num_after = 0
        self.has_begun = not self._marker

    def after(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The part of the answer's next tokens to which the constraint applies."""
        num_before = 0
        while not self.has_begun and num_before < len(token_ids):
            self._before.append(token_ids[num_before])
            num_before += 1
            self.has_begun = self._before[-len(self._marker) :] == self._marker
        self._num_after += len(token_ids) - num_before
        return token_ids[num_before:] if num_before else token_ids

    def take_back(self, num_tokens: int) -> int:
        """Forget the answer's last tokens. Returns how many of them were under the constraint."""
        num_after = min(num_tokens, self._num_after)
        self._num_after -= num_after
        if num_before := num_tokens - num_after:
            del self._before[-num_before:]
            self.has_begun = False
        return num_after
