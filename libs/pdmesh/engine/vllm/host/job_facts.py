"""The facts that `Jobs` takes about a vLLM engine's jobs, and the effects that it returns.

A job is the instance's order to prefill or decode one request. A ticket is the right to pull one
prompt's KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.engine.base import (
    Failed,
    FinishReason,
    Output,
    PromptLogprobs,
    TokenLogprob,
    constraint_failed,
)
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
from pdmesh.errors import EngineFailed


@dataclass(frozen=True, slots=True)
class Drawn:
    """vLLM drew tokens for a leg, which is a request's stay on this instance.

    If `is_error` is set, vLLM failed the request instead. `is_constraint_error` means that the
    reason was the request's constraint, a grammar that the answer must follow.
    """

    leg: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    is_error: bool = False
    is_constraint_error: bool = False
    prompt_logprobs: PromptLogprobs | None = None  # comes with the first token


@dataclass(frozen=True, slots=True)
class ReleaseAtRanks:
    """Effect: tell every rank that no peer will pull this ticket's KV."""

    ticket_id: str


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Effect: tell vLLM that the leg is over."""

    leg: int


def failure_of(drawn: Drawn) -> Failed:
    """The engine's output about a request that vLLM failed."""
    if drawn.is_constraint_error:
        return constraint_failed(drawn.leg)
    return Failed(drawn.leg, EngineFailed.default_reason, "vLLM failed the request")


Effect = Output | ReleaseAtRanks | CancelRequest
Landing = Pulling | Arrived | Received | PullFailed | RankLandingFreed
Fact = Drawn | RankTicketOpened | Staged | StageFailed | RankTicketClosed | Landing
