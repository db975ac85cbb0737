"""Prefills of one vLLM engine whose KV is handed on whole, after the prompt is computed.

A ticket is the right to pull one prompt's KV. The ticket is announced to the host when vLLM has
drawn token 1 and every rank has staged the KV, which means that the KV is in memory that a decode
can pull from. `TicketClosed` comes after that. The ranks' reports and vLLM's tokens may arrive in
any order. If the ticket is not announced, the prefill's end is announced once all ranks have closed
the ticket. The host is the part of the instance outside the engine. A leg is a request's stay on
this instance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pdmesh.engine.base import Failed, FinishReason, Prefilled, PrefillJob, Ticket, TicketClosed
from pdmesh.engine.vllm.host.job_facts import (
    CancelRequest,
    Drawn,
    Effect,
    ReleaseAtRanks,
    failure_of,
)
from pdmesh.engine.vllm.host.per_layer import worst
from pdmesh.engine.vllm.messages import RankTicketClosed, Staged, StageFailed
from pdmesh.errors import KvTransferFailed


@dataclass(slots=True)
class _Handing:
    """A prefill whose KV is handed on, from its start until all ranks have closed its ticket."""

    job: PrefillJob
    drawn: Drawn | None = None
    staged: set[int] = field(default_factory=set)
    ended: dict[int, str] = field(default_factory=dict)  # rank -> reason
    failure: Failed | None = None
    is_announced: bool = False  # the host has a terminal output of the leg, or has aborted it
    is_aborted: bool = False


class WholePrefills:
    def __init__(self, num_ranks: int, ticket_of: Callable[[PrefillJob], Ticket]) -> None:
        self._num_ranks, self._ticket_of = num_ranks, ticket_of
        self._by_leg: dict[int, _Handing] = {}
        self._leg_of_ticket: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._by_leg)

    @property
    def num_open(self) -> int:
        return sum(not h.is_announced for h in self._by_leg.values())

    def owns(self, leg: int) -> bool:
        return leg in self._by_leg

    def owns_ticket(self, ticket_id: str) -> bool:
        return ticket_id in self._leg_of_ticket

    def start(self, job: PrefillJob) -> None:
        self._by_leg[job.leg] = _Handing(job)
        self._leg_of_ticket[job.ticket_id] = job.leg

    def refused(self, failed: Failed) -> list[Effect]:
        """End the job of a request that vLLM never took. No worker knows this request."""
        handing = self._by_leg[failed.leg]
        self._forget(handing)
        if handing.is_aborted:
            return [TicketClosed(handing.job.ticket_id, "released")]
        return [failed]

    def abort(self, leg: int) -> list[Effect]:
        handing = self._by_leg[leg]
        if handing.is_aborted:
            return []
        cancel: list[Effect] = [] if handing.drawn else [CancelRequest(leg)]
        handing.is_announced = handing.is_aborted = True
        return [*cancel, ReleaseAtRanks(handing.job.ticket_id)]

    def drawn(self, drawn: Drawn) -> list[Effect]:
        handing = self._by_leg[drawn.leg]
        handing.drawn = drawn
        if drawn.is_error:
            handing.failure = handing.failure or failure_of(drawn)
        return self._settle(handing)

    def handle(self, fact: Staged | StageFailed | RankTicketClosed) -> list[Effect]:
        handing = self._by_leg[self._leg_of_ticket[fact.ticket_id]]
        match fact:
            case Staged():
                handing.staged.add(fact.rank)
            case StageFailed():
                leg, reason = handing.job.leg, KvTransferFailed.default_reason
                handing.failure = Failed(leg, reason, fact.message)
            case RankTicketClosed():
                handing.ended[fact.rank] = fact.reason
        return self._settle(handing)

    def _settle(self, handing: _Handing) -> list[Effect]:
        """Announce the prefill's end when all reports that it needs have arrived.

        After a failure, or an answer that stops at token 1, the ranks have to close the ticket
        first.
        """
        job, drawn = handing.job, handing.drawn
        if len(handing.ended) == self._num_ranks:
            return self._close(handing)
        if drawn is None or handing.is_announced:
            return []
        if handing.failure or drawn.finish_reason is FinishReason.STOP:
            return [ReleaseAtRanks(job.ticket_id)]  # `_close` announces the prefill's end
        if len(handing.staged) < self._num_ranks:
            return []
        handing.is_announced = True
        return [self._prefilled(handing, drawn, self._ticket_of(job), None)]

    def _close(self, handing: _Handing) -> list[Effect]:
        job, drawn = handing.job, handing.drawn
        if drawn is None and not handing.is_aborted:
            return []  # vLLM's output for the prefill is still to come
        self._forget(handing)
        if handing.is_announced:
            return [TicketClosed(job.ticket_id, worst(handing.ended.values()))]
        assert drawn is not None
        if drawn.finish_reason is FinishReason.STOP and not handing.failure:
            return [self._prefilled(handing, drawn, None, FinishReason.STOP)]
        message = "the staged KV ended before it was announced"
        return [handing.failure or Failed(job.leg, KvTransferFailed.default_reason, message)]

    @staticmethod
    def _prefilled(
        handing: _Handing, drawn: Drawn, ticket: Ticket | None, finish: FinishReason | None
    ) -> Prefilled:
        logprob = drawn.logprobs[0] if drawn.logprobs else None
        token, cached = drawn.token_ids[0], drawn.num_cached_tokens
        prompt = drawn.prompt_logprobs
        return Prefilled(handing.job.leg, token, ticket, cached, finish, logprob, prompt)

    def _forget(self, handing: _Handing) -> None:
        del self._by_leg[handing.job.leg], self._leg_of_ticket[handing.job.ticket_id]

    def check_invariants(self) -> None:
        assert set(self._leg_of_ticket.values()) == set(self._by_leg)
