"""Prefills of one vLLM engine whose KV is handed on layer by layer, during the computation.

A ticket is the right to pull one prompt's KV. The ticket is announced to the host when every rank
has opened it. The KV may have been taken, and the ticket closed, before token 1 is read here. The
host gets `TicketClosed` once for each job, however the job ends. The host is the part of the
instance outside the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pdmesh.engine.base import (
    Failed,
    FinishReason,
    Prefilled,
    PrefillJob,
    Ticket,
    TicketClosed,
    TicketOpened,
)
from pdmesh.engine.vllm.host.job_facts import (
    CancelRequest,
    Drawn,
    Effect,
    ReleaseAtRanks,
    failure_of,
)
from pdmesh.engine.vllm.messages import RankTicketClosed, RankTicketOpened, StageFailed
from pdmesh.errors import KvTransferFailed


@dataclass(slots=True)
class _Streaming:
    job: PrefillJob
    ticket: Ticket
    opened: set[int] = field(default_factory=set)
    ended: dict[int, str] = field(default_factory=dict)  # rank -> reason
    is_announced: bool = False
    has_drawn: bool = False
    is_over: bool = False  # the host has the job's last output, or has aborted it


class PerLayerPrefills:
    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._by_leg: dict[int, _Streaming] = {}
        self._leg_of_ticket: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._by_leg)

    @property
    def num_open(self) -> int:
        return sum(not s.is_over for s in self._by_leg.values())

    def owns(self, leg: int) -> bool:
        return leg in self._by_leg

    def owns_ticket(self, ticket_id: str) -> bool:
        return ticket_id in self._leg_of_ticket

    def start(self, job: PrefillJob, ticket: Ticket) -> None:
        self._by_leg[job.leg] = _Streaming(job, ticket)
        self._leg_of_ticket[job.ticket_id] = job.leg

    def abort(self, leg: int) -> list[Effect]:
        streaming = self._by_leg[leg]
        effects: list[Effect] = []
        if not streaming.is_over and not streaming.has_drawn:
            effects.append(CancelRequest(leg))
        return effects + self._end(streaming)

    def refused(self, failed: Failed) -> list[Effect]:
        """End the job of a request that vLLM never took. Its ticket may be open nevertheless."""
        streaming = self._by_leg[failed.leg]
        end = [] if streaming.is_over else [failed]
        return [*end, *self._end(streaming)]

    def drawn(self, drawn: Drawn) -> list[Effect]:
        """vLLM drew token 1, or failed the request."""
        streaming = self._by_leg[drawn.leg]
        if streaming.is_over:
            return []
        streaming.has_drawn = True
        if drawn.is_error or not drawn.token_ids:
            return [failure_of(drawn), *self._end(streaming)]
        is_stop = drawn.finish_reason is FinishReason.STOP
        prefilled = Prefilled(
            drawn.leg,
            drawn.token_ids[0],
            None if is_stop else streaming.ticket,
            drawn.num_cached_tokens,
            FinishReason.STOP if is_stop else None,
            drawn.logprobs[0] if drawn.logprobs else None,
            drawn.prompt_logprobs,
        )
        effects: list[Effect] = [*self._announce(streaming), prefilled]
        if is_stop:
            return effects + self._end(streaming)
        streaming.is_over = True
        self._forget_if_done(streaming)
        return effects

    def handle(self, fact: RankTicketOpened | StageFailed | RankTicketClosed) -> list[Effect]:
        streaming = self._by_leg[self._leg_of_ticket[fact.ticket_id]]
        match fact:
            case RankTicketOpened():
                streaming.opened.add(fact.rank)
                is_open = len(streaming.opened) == self._num_ranks and not streaming.is_over
                return self._announce(streaming) if is_open else []
            case StageFailed():
                if streaming.is_over:
                    return []
                leg, reason = streaming.job.leg, KvTransferFailed.default_reason
                failed = Failed(leg, reason, fact.message)
                return [failed, CancelRequest(leg), *self._end(streaming)]
            case RankTicketClosed():
                streaming.ended[fact.rank] = fact.reason
                if len(streaming.ended) < self._num_ranks:
                    return []
                self._forget_if_done(streaming)
                return [TicketClosed(fact.ticket_id, worst(streaming.ended.values()))]

    def _announce(self, streaming: _Streaming) -> list[Effect]:
        if streaming.is_announced:
            return []
        streaming.is_announced = True
        return [TicketOpened(streaming.job.leg, streaming.ticket)]

    def _end(self, streaming: _Streaming) -> list[Effect]:
        """No decode will pull the KV any more. Each rank closes the ticket, if it is still open."""
        streaming.is_over = True
        self._forget_if_done(streaming)
        is_closed = len(streaming.ended) == self._num_ranks
        return [] if is_closed else [ReleaseAtRanks(streaming.job.ticket_id)]

    def _forget_if_done(self, streaming: _Streaming) -> None:
        if streaming.is_over and len(streaming.ended) == self._num_ranks:
            del self._by_leg[streaming.job.leg], self._leg_of_ticket[streaming.job.ticket_id]

    def check_invariants(self) -> None:
        assert set(self._leg_of_ticket.values()) == set(self._by_leg)
        for streaming in self._by_leg.values():
            assert not (streaming.is_over and len(streaming.ended) == self._num_ranks)


def worst(reasons: Iterable[str]) -> str:
    order = ("failed", "expired", "released", "taken")
    return min(reasons, key=lambda reason: order.index(reason) if reason in order else 0)
