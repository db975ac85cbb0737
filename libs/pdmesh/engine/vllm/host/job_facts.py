"""The facts about a vLLM engine's jobs and the effects on it, beside the outputs for the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.engine.base import FinishReason, Output, PromptLogprobs, TokenLogprob
from pdmesh.engine.vllm.messages import (
    Arrived,
    PullFailed,
    Pulling,
    RankLandingFreed,
    RankTicketClosed,
    RankTicketOpened,
    Received,
    Staged,
    StageFailed,
)


@dataclass(frozen=True, slots=True)
class Drawn:
    """vLLM drew tokens for a leg; if `error` is set, it failed the request instead."""

    leg: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    is_error: bool = False
    prompt_logprobs: PromptLogprobs | None = None  # with the first token


@dataclass(frozen=True, slots=True)
class ReleaseAtRanks:
    """Effect: tell every rank that no peer will pull this ticket."""

    ticket_id: str


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Effect: tell vLLM that the leg is over."""

    leg: int


Effect = Output | ReleaseAtRanks | CancelRequest
Landing = Pulling | Arrived | Received | PullFailed | RankLandingFreed
Fact = Drawn | RankTicketOpened | Staged | StageFailed | RankTicketClosed | Landing
