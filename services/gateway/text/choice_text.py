"""The output of one choice for the client: new text, token ids and log probabilities.

A choice is one answer of a call. A new token is only appended to a list. The text is made when the
writer of the stream takes it, so that a busy stream decodes many tokens in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from pdmesh.core.request.events import (
    Cancelled,
    Complete,
    Fail,
    FinishReason,
)
from pdmesh.core.sampling.repetition import RepeatedEnd
from pdmesh.errors import MeshError
from pdmesh.services.gateway.text.text_stream import TextStream
from pdmesh.v1.common_pb2 import PromptLogprobs, TokenLogprob

EndReason = FinishReason | Literal["tool_calls", "repetition"]
_REPETITION: Final = "repetition_detected"  # vLLM's name for this reason


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A new piece of a tool call. The first piece has the id and the name of the call."""

    index: int  # the call's place among the answer's tool calls
    arguments: str = ""
    id: str = ""
    name: str = ""


class TextDelta(msgspec.Struct, frozen=True):
    """The output of one choice since the last delta.

    The last delta of a choice has `is_last`. It has a finish reason, unless the choice failed (see
    `error`) or the client left. `stop_reason` is the stop string or stop token that ended the
    choice, or "repetition_detected". It is None if the choice ended in another way, for example by
    the model's own end token. The reasoning of a delta precedes its text, and the text precedes its
    tool calls.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    is_last: bool = False
    finish_reason: EndReason | None = None
    error: MeshError | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | None = None  # once, with the first token
    reasoning: str = ""
    calls: Sequence[ToolCallDelta] = ()
    num_reasoning_tokens: int = 0  # set in the last delta

    @property
    def num_logprobs(self) -> int:
        """A lower bound of the number of log probabilities that must be written."""
        num_of_prompt = len(self.prompt_logprobs.token_ids) if self.prompt_logprobs else 0
        if not self.logprobs:
            return num_of_prompt
        # Up to 20 alternatives to a token are not counted.
        num_each = 1 + len(self.logprobs[0].top_token_ids) // 21
        return len(self.logprobs) * num_each + num_of_prompt


class ChoiceText:
    """Makes the deltas of one choice.

    `default_text` becomes the whole answer if no instance can begin an answer in time (S44).
    `repeated` detects that the answer repeats itself, and the answer then ends there.
    """

    __slots__ = (
        "_default_text", "_index", "_is_last_taken", "_logprobs", "_may_stop", "_num_taken",
        "_repeated", "_text", "prompt_logprobs",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        text: TextStream,
        *,
        has_logprobs: bool,
        default_text: str | None,
        repeated: RepeatedEnd | None = None,
    ) -> None:
        self._index = index
        self._text = text
        self._repeated = repeated
        self._may_stop = text.has_stops or repeated is not None
        self._logprobs: list[TokenLogprob] | None = [] if has_logprobs else None
        self._default_text = default_text
        self.prompt_logprobs: PromptLogprobs | None = None  # set until `take` has returned them
        self._num_taken = 0
        self._is_last_taken = False

    @property
    def has_logprobs(self) -> bool:
        """Whether the client asked for log probabilities."""
        return self._logprobs is not None

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string or a repetition has ended the answer."""
        if not self._may_stop:
            return False
        return self._text.is_stopped or (self._repeated is not None and self._repeated.is_found)

    def num_tokens(self, num_emitted: int) -> int:
        """The number of tokens of the answer. Tokens after a stop do not count."""
        return self._text.num_tokens if self.is_stopped else num_emitted

    @property
    def num_taken(self) -> int:
        """The number of the answer's tokens that `take` has returned."""
        return self.num_tokens(self._num_taken)

    def add_logprobs(self, logprobs: Sequence[TokenLogprob]) -> None:
        if self._logprobs is not None:
            self._logprobs.extend(logprobs)

    def take(self, emitted: Sequence[int]) -> TextDelta | None:
        """The new part of `emitted`, which holds all tokens so far. None after the last delta.

        If the client asked for log probabilities, a token is returned only once its log probability
        has arrived.
        """
        if self._is_last_taken:
            return None
        end = len(emitted) if self._logprobs is None else min(len(emitted), len(self._logprobs))
        begin, self._num_taken = self._num_taken, end
        token_ids = emitted[begin:end]
        if self._repeated is not None:
            token_ids = self._repeated.feed(token_ids)
        text = self._text.feed(token_ids) if token_ids else ""
        if self._text.is_stopped:
            token_ids = token_ids[: self._text.num_tokens - begin]
        logprobs = self._logprobs[begin : begin + len(token_ids)] if self._logprobs else ()
        taken = TextDelta(self._index, text, token_ids, logprobs)
        if self.prompt_logprobs is not None and token_ids:
            taken = replace(taken, prompt_logprobs=self.prompt_logprobs)
            self.prompt_logprobs = None
        return taken

    def last(
        self,
        taken: TextDelta,
        outcome: Complete | Fail | Cancelled | None,
        error: MeshError | None,
        *,
        is_empty: bool,
        stop_token: int | None = None,
    ) -> TextDelta:
        """Turn `taken` into the last delta of the choice.

        `error` is the reason if the choice was cancelled. `is_empty` is true if no token was
        emitted. `stop_token` is the stop token that ended the choice, if any.
        """
        self._is_last_taken = True
        if self._text.is_stopped:
            stopped_by = self._text.stopped_by
            return replace(taken, is_last=True, finish_reason="stop", stop_reason=stopped_by)
        text = taken.text + self._text.finish()
        if self.is_stopped:
            return replace(
                taken, text=text, is_last=True, finish_reason="repetition", stop_reason=_REPETITION
            )
        if isinstance(outcome, Complete):
            reason = outcome.finish_reason
            return replace(
                taken, text=text, is_last=True, finish_reason=reason, stop_reason=stop_token
            )
        if isinstance(outcome, Fail):
            error = outcome.error
        can_wait = error is not None and error.is_retryable
        if can_wait and is_empty and self._default_text is not None:
            return replace(taken, text=self._default_text, is_last=True, finish_reason="stop")
        return replace(taken, text=text, is_last=True, error=error)
