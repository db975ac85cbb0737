"""What one choice has produced, as its client takes it: new text, token ids and log probabilities.

Emitting only appends tokens. Their text is made when the writer takes it, all at once, so that a
busy stream costs one pass for many tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.core.request.events import (
    Cancelled,
    Complete,
    Fail,
    FinishReason,
)
from pdmesh.errors import MeshError
from pdmesh.services.gateway.text.text_stream import TextStream
from pdmesh.v1.common_pb2 import TokenLogprob


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one choice produced since the last delta.

    `is_last` comes once, with a finish reason or an error.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    is_last: bool = False
    finish_reason: FinishReason | None = None
    error: MeshError | None = None


class ChoiceText:
    """`default_text` is the whole answer if no instance could begin one in time (S44)."""

    __slots__ = (
        "_default_text", "_index", "_is_last_taken", "_logprobs", "_num_taken", "_text",
    )  # fmt: skip

    def __init__(
        self, index: int, text: TextStream, *, has_logprobs: bool, default_text: str | None
    ) -> None:
        self._index = index
        self._text = text
        self._logprobs: list[TokenLogprob] | None = [] if has_logprobs else None
        self._default_text = default_text
        self._num_taken = 0
        self._is_last_taken = False

    @property
    def has_logprobs(self) -> bool:
        """Whether log probabilities are asked for."""
        return self._logprobs is not None

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._text.is_stopped

    def num_tokens(self, num_emitted: int) -> int:
        """The number of tokens that count: none after a stop string."""
        return self._text.num_tokens if self._text.is_stopped else num_emitted

    @property
    def num_taken(self) -> int:
        """The number of tokens that count and were taken."""
        return self.num_tokens(self._num_taken)

    def add_logprobs(self, logprobs: Sequence[TokenLogprob]) -> None:
        if self._logprobs is not None:
            self._logprobs.extend(logprobs)

    def take(self, emitted: Sequence[int]) -> TextDelta | None:
        """All that is new of `emitted`; None after the last delta.

        If log probabilities are asked for, only tokens that have them.
        """
        if self._is_last_taken:
            return None
        end = len(emitted) if self._logprobs is None else min(len(emitted), len(self._logprobs))
        begin, self._num_taken = self._num_taken, end
        token_ids = emitted[begin:end]
        text = self._text.feed(token_ids) if token_ids else ""
        if self._text.is_stopped:
            token_ids = token_ids[: self._text.num_tokens - begin]
        logprobs = self._logprobs[begin : begin + len(token_ids)] if self._logprobs else ()
        return TextDelta(self._index, text, token_ids, logprobs)

    def last(
        self,
        taken: TextDelta,
        outcome: Complete | Fail | Cancelled | None,
        error: MeshError | None,
        *,
        is_empty: bool,
    ) -> TextDelta:
        """`taken` as the last delta of the choice; `error`: why, if it was cancelled.

        `is_empty`: nothing was emitted.
        """
        self._is_last_taken = True
        text, token_ids, logprobs = taken.text, taken.token_ids, taken.logprobs
        if self._text.is_stopped:
            return TextDelta(self._index, text, token_ids, logprobs, True, "stop")
        text += self._text.finish()
        if isinstance(outcome, Complete):
            return TextDelta(self._index, text, token_ids, logprobs, True, outcome.finish_reason)
        if isinstance(outcome, Fail):
            error = outcome.error
        can_wait = error is not None and error.is_retryable
        if can_wait and is_empty and self._default_text is not None:
            return TextDelta(self._index, self._default_text, token_ids, logprobs, True, "stop")
        return TextDelta(self._index, text, token_ids, logprobs, True, None, error)
