"""The state of one answer under a constraint, a grammar that decides which tokens may come next.

A constraint may begin later than the answer, for example after the model's reasoning. Any token may
come before the constraint begins. Any token may also come after the EOS token, if the answer
continues (`ignore_eos`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pdmesh.core.sampling.constraint import Constraint, ConstraintStart
from pdmesh.engine.grammars.compiler import GrammarCompiler, GrammarRefused

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Guide:
    """Follows an answer token by token. The last tokens can be taken back."""

    def __init__(self, matcher: LLMatcher, start: ConstraintStart, eos_token: int) -> None:
        self.matcher = matcher
        self._start, self._eos_token = start, eos_token
        # One entry for each token since the constraint began: whether the matcher consumed it.
        self._consumed: list[bool] = []
        # The length of `_consumed` right after the EOS token. None before the EOS token.
        self._num_until_end: int | None = None

    @classmethod
    def after(
        cls, constraint: Constraint, compiler: GrammarCompiler, drawn: Sequence[int]
    ) -> Guide:
        """Compile the grammar, and accept the answer so far (`drawn`). Raises GrammarRefused."""
        matcher = compiler.matcher(constraint.grammar)
        guide = cls(
            matcher, ConstraintStart(constraint.begins_after), compiler.vocabulary.eos_token
        )
        if not guide.accept(drawn):
            raise GrammarRefused("the grammar does not allow the answer so far")
        return guide

    @property
    def is_free(self) -> bool:
        """Whether nothing constrains the next token."""
        return not self._start.has_begun or self._num_until_end is not None

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Add tokens to the answer. Return False if the constraint refuses them, or has failed."""
        taken = all(self._take(token_id) for token_id in self._start.after(token_ids))
        return taken and not self.matcher.is_error()

    def _take(self, token_id: int) -> bool:
        if self._num_until_end is not None:
            self._consumed.append(False)
            return True
        is_complete = self.matcher.is_stopped() and not self.matcher.is_error()
        self._consumed.append(not is_complete)
        if token_id == self._eos_token:
            self._num_until_end = len(self._consumed)
        return token_id == self._eos_token if is_complete else self.matcher.consume_token(token_id)

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """The number of leading tokens of `token_ids` that may come next.

        Once the grammar is complete, no constrained token is counted, although EOS may come.
        """
        after = list(self._start.after(token_ids))
        self._start.take_back(len(token_ids))
        num_before = len(token_ids) - len(after)
        if not after or self.matcher.is_stopped():
            return num_before
        return num_before + self.matcher.validate_tokens(after)

    def give_back(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` tokens."""
        num_after = self._start.take_back(num_tokens)
        if not num_after:
            return
        num_consumed = sum(self._consumed[-num_after:])
        del self._consumed[-num_after:]
        if self._num_until_end is not None and self._num_until_end > len(self._consumed):
            self._num_until_end = None
        if num_consumed:
            self.matcher.rollback(num_consumed)
