"""The jobs of one vLLM engine: what its outputs and its workers' messages mean to the host.

Facts about one job arrive on two ways, tokens through vLLM and KV through the control socket, in any order.
This decides the one order the host sees: a ticket is announced when every rank has staged, tokens of
a decode come after its KV, and a reserved range is given back when every rank is done with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdmesh.core import kv_format
from pdmesh.core.ticket import PullFailure
from pdmesh.engine.base import (
    DecodeJob,
    Failed,
    Finished,
    FinishReason,
    KvReceived,
    LandingFreed,
    Prefilled,
    PrefillJob,
    Ticket,
    TicketClosed,
    TokenLogprob,
    Tokens,
    hands_on,
)
from pdmesh.engine.vllm.job_facts import CancelRequest, Drawn, Effect, Fact, ReleaseTicket
from pdmesh.engine.vllm.messages import (
    LandingClear,
    Opened,
    PullFailed,
    Received,
    Staged,
    StageFailed,
    TicketEnded,
)
from pdmesh.engine.vllm.per_layer import PerLayerPrefills, worst
from pdmesh.errors import KvFormatMismatch, KvTransferFailed


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What all tickets of this engine have in common."""

    instance_id: str
    incarnation: int
    model_fingerprint: str
    addresses: tuple[str, ...]  # one per rank
    kv_bytes_per_token: int  # of one rank
    block_size: int
    lease_ms: int
    max_model_len: int

    def ticket(self, job: PrefillJob) -> Ticket:
        num_tokens = len(job.prompt)
        num_blocks = -(-num_tokens // self.block_size)
        return Ticket(
            ticket_id=job.ticket_id,
            request_id=job.request_id,
            attempt=job.attempt,
            instance_id=self.instance_id,
            incarnation=self.incarnation,
            model_fingerprint=self.model_fingerprint,
            num_tokens=num_tokens,
            kv_bytes=num_blocks * self.block_size * self.kv_bytes_per_token,
            addresses=self.addresses,
            lease_ms=self.lease_ms,
        )


@dataclass(slots=True)
class _Handing:
    """A prefill whose KV goes elsewhere, from its start until its ticket has ended on all ranks."""

    job: PrefillJob
    drawn: Drawn | None = None
    staged: set[int] = field(default_factory=set)
    ended: dict[int, str] = field(default_factory=dict)  # rank -> reason
    failure: str = ""
    is_announced: bool = False  # the host has seen a terminal output of the leg, or aborted it
    is_aborted: bool = False


@dataclass(slots=True)
class _Taking:
    """A decode, from its start until it has ended and its landing range is clear on all ranks."""

    job: DecodeJob
    received: dict[int, Received] = field(default_factory=dict)
    held: list[Drawn] = field(default_factory=list)
    cleared: set[int] = field(default_factory=set)
    is_over: bool = False


@dataclass(slots=True)
class _Local:
    job: PrefillJob
    has_first: bool = False


class Jobs:
    """`handle` takes a fact and returns what follows; starts and aborts are commands of the host."""

    def __init__(self, endpoint: Endpoint, num_ranks: int) -> None:
        self._endpoint, self._num_ranks = endpoint, num_ranks
        self._handing: dict[int, _Handing] = {}
        self._leg_of_ticket: dict[str, int] = {}
        self._taking: dict[int, _Taking] = {}
        self._local: dict[int, _Local] = {}
        self._per_layer = PerLayerPrefills(num_ranks)

    @property
    def num_open(self) -> int:
        """Legs whose terminal output has not been emitted."""
        handing = sum(not h.is_announced for h in self._handing.values())
        taking = sum(not t.is_over for t in self._taking.values())
        return handing + taking + len(self._local) + self._per_layer.num_open

    @property
    def is_idle(self) -> bool:
        """Nothing is held for any leg or ticket."""
        return not (self._handing or self._taking or self._local or self._per_layer)

    def prefill(self, job: PrefillJob) -> None:
        if not hands_on(job, self._endpoint.max_model_len):
            self._local[job.leg] = _Local(job)
        elif job.is_per_layer:
            self._per_layer.start(job, self._endpoint.ticket(job))
        else:
            self._handing[job.leg] = _Handing(job)
            self._leg_of_ticket[job.ticket_id] = job.leg

    def decode(self, job: DecodeJob) -> list[Effect]:
        """Effects only for a ticket whose KV does not fit this engine: the leg is over before it began."""
        ours, ticket = self._endpoint, job.ticket
        why = kv_format.difference(
            ticket.model_fingerprint, ours.model_fingerprint, ticket.instance_id, ours.instance_id
        )
        num_theirs = len(ticket.addresses)
        if not why and not kv_format.may_meet(ours.model_fingerprint, self._num_ranks, num_theirs):
            why = (
                f"{ticket.instance_id} has {num_theirs} ranks, {ours.instance_id} {self._num_ranks}"
            )
        if why:
            failed = Failed(job.leg, KvFormatMismatch.default_reason, why)
            return [failed, LandingFreed(job.leg)]
        self._taking[job.leg] = _Taking(job)
        return []

    def refused(self, leg: int, message: str) -> list[Effect]:
        """vLLM never took the request: nothing of it can reach a worker."""
        if self._per_layer.owns(leg):
            return self._per_layer.refused(leg, message)
        local, taking = self._local.pop(leg, None), self._taking.pop(leg, None)
        handing = self._handing.pop(leg, None)
        effects: list[Effect] = []
        if handing:
            del self._leg_of_ticket[handing.job.ticket_id]
            if handing.is_aborted:
                return [TicketClosed(handing.job.ticket_id, "released")]
        if (taking and not taking.is_over) or handing or local:
            effects.append(Failed(leg, "ENGINE_FAILED", message))
        if taking:
            effects.append(LandingFreed(leg))
        return effects

    def abort(self, leg: int) -> list[Effect]:
        """The host wants nothing more of the leg, its ticket included."""
        if self._per_layer.owns(leg):
            return self._per_layer.abort(leg)
        if (local := self._local.pop(leg, None)) is not None:
            unused = [TicketClosed(local.job.ticket_id, "released")] if local.job.staging else []
            return [CancelRequest(leg), *unused]
        taking = self._taking.get(leg)
        if taking and not taking.is_over:
            self._end_taking(leg, taking)
            return [CancelRequest(leg)]
        handing = self._handing.get(leg)
        if handing is None or handing.is_aborted:
            return []
        cancel: list[Effect] = [] if handing.drawn else [CancelRequest(leg)]
        handing.is_announced = handing.is_aborted = True
        return [*cancel, ReleaseTicket(handing.job.ticket_id)]

    def release(self, ticket_id: str) -> list[Effect]:
        is_known = ticket_id in self._leg_of_ticket or self._per_layer.owns_ticket(ticket_id)
        return [ReleaseTicket(ticket_id)] if is_known else []

    def awaits_first_token(self, leg: int) -> bool:
        taking = self._taking.get(leg)
        return taking is not None and taking.job.first_token is None and not taking.is_over

    def overdue(self, leg: int) -> list[Effect]:
        """The leg's deadline for its KV is over; the pull itself has ended or will within its own."""
        taking = self._taking.get(leg)
        if taking is None or taking.is_over or len(taking.received) == self._num_ranks:
            return []
        self._end_taking(leg, taking)
        message = f"{PullFailure.TIMEOUT}: the KV did not arrive before its deadline"
        failed = Failed(leg, KvTransferFailed.default_reason, message, cause=PullFailure.TIMEOUT)
        return [failed, CancelRequest(leg)]

    def handle(self, fact: Fact) -> list[Effect]:
        match fact:
            case Drawn():
                return self._on_drawn(fact)
            case Opened() | Staged() | StageFailed() | TicketEnded():
                return self._on_ticket(fact)
            case Received() | PullFailed() | LandingClear():
                return self._on_landing(fact)

    # tokens

    def _on_drawn(self, drawn: Drawn) -> list[Effect]:
        if (local := self._local.get(drawn.leg)) is not None:
            return self._on_local(local, drawn)
        if (taking := self._taking.get(drawn.leg)) is not None:
            return [] if taking.is_over else self._on_decoded(taking, drawn)
        if self._per_layer.owns(drawn.leg):
            return self._per_layer.drawn(drawn)
        if (handing := self._handing.get(drawn.leg)) is not None:
            handing.drawn = drawn
            if drawn.is_error:
                handing.failure = handing.failure or "vLLM failed the request"
            return self._settle(handing)
        return []

    def _on_local(self, local: _Local, drawn: Drawn) -> list[Effect]:
        leg, effects = drawn.leg, []
        tokens, logprobs, finish = drawn.token_ids, drawn.logprobs, drawn.finish_reason
        if drawn.is_error:
            del self._local[leg]
            return [Failed(leg, "ENGINE_FAILED", "vLLM failed the request")]
        if not local.has_first and tokens:
            local.has_first = True
            ends = finish if len(tokens) == 1 else None
            first = logprobs[0] if logprobs else None
            effects = [Prefilled(leg, tokens[0], None, drawn.num_cached_tokens, ends, first)]
            tokens, logprobs = tokens[1:], logprobs[1:]
            if ends:
                del self._local[leg]
                return [*effects]
        if finish:
            del self._local[leg]
        return [*effects, *_tokens(leg, tokens, logprobs, finish)]

    def _on_decoded(self, taking: _Taking, drawn: Drawn) -> list[Effect]:
        if drawn.is_error:
            return self._fail_taking(
                taking, KvTransferFailed.default_reason, "vLLM failed the request"
            )
        if len(taking.received) < self._num_ranks:
            taking.held.append(drawn)
            return []
        effects = _tokens(drawn.leg, drawn.token_ids, drawn.logprobs, drawn.finish_reason)
        if drawn.finish_reason:
            self._end_taking(drawn.leg, taking)
        return effects

    # tickets

    def _on_ticket(self, fact: Opened | Staged | StageFailed | TicketEnded) -> list[Effect]:
        if self._per_layer.owns_ticket(fact.ticket_id):
            return [] if isinstance(fact, Staged) else self._per_layer.handle(fact)
        leg = self._leg_of_ticket.get(fact.ticket_id)
        if leg is None:
            return []
        handing = self._handing[leg]
        match fact:
            case Staged():
                handing.staged.add(fact.rank)
            case StageFailed():
                handing.failure = fact.message
            case TicketEnded():
                handing.ended[fact.rank] = fact.reason
        return self._settle(handing)

    def _settle(self, handing: _Handing) -> list[Effect]:
        """Announce the prefill's end once all ranks agree on it, and close the ticket after that."""
        job, drawn = handing.job, handing.drawn
        if len(handing.ended) == self._num_ranks:
            return self._close(handing)
        if drawn is None or handing.is_announced:
            return []
        if handing.failure or drawn.finish_reason is FinishReason.STOP:
            return [ReleaseTicket(job.ticket_id)]  # announced when it has ended
        if len(handing.staged) < self._num_ranks:
            return []
        handing.is_announced = True
        return [self._prefilled(handing, drawn, self._endpoint.ticket(job), None)]

    def _close(self, handing: _Handing) -> list[Effect]:
        job, drawn = handing.job, handing.drawn
        if drawn is None and not handing.is_aborted:
            return []  # its last word is still under way
        del self._handing[job.leg], self._leg_of_ticket[job.ticket_id]
        if handing.is_announced:
            return [TicketClosed(job.ticket_id, worst(handing.ended.values()))]
        assert drawn is not None
        if drawn.finish_reason is FinishReason.STOP and not handing.failure:
            return [self._prefilled(handing, drawn, None, FinishReason.STOP)]
        message = handing.failure or "the staged KV ended before it was announced"
        return [Failed(job.leg, KvTransferFailed.default_reason, message)]

    @staticmethod
    def _prefilled(
        handing: _Handing, drawn: Drawn, ticket: Ticket | None, finish: FinishReason | None
    ) -> Prefilled:
        logprob = drawn.logprobs[0] if drawn.logprobs else None
        token, cached = drawn.token_ids[0], drawn.num_cached_tokens
        return Prefilled(handing.job.leg, token, ticket, cached, finish, logprob)

    # landings

    def _on_landing(self, fact: Received | PullFailed | LandingClear) -> list[Effect]:
        taking = self._taking.get(fact.leg)
        if taking is None:
            return []
        match fact:
            case Received():
                taking.received[fact.rank] = fact
                return self._on_received(taking)
            case PullFailed():
                if taking.is_over:
                    return []
                return self._fail_taking(taking, fact.reason, fact.message, fact.cause)
            case LandingClear():
                taking.cleared.add(fact.rank)
                self._forget_taken(fact.leg, taking)
                return [LandingFreed(fact.leg)] if len(taking.cleared) == self._num_ranks else []

    def _on_received(self, taking: _Taking) -> list[Effect]:
        ranks = list(taking.received.values())
        if taking.is_over or len(ranks) < self._num_ranks:
            return []
        effects: list[Effect] = [
            KvReceived(
                taking.job.leg,
                sum(r.kv_bytes for r in ranks),
                max(r.duration_s for r in ranks),
                max(r.num_computed_tokens for r in ranks),
            )
        ]
        held, taking.held = taking.held, []
        for drawn in held:
            effects += self._on_decoded(taking, drawn)
        return effects

    def _fail_taking(
        self, taking: _Taking, reason: str, message: str, cause: str = ""
    ) -> list[Effect]:
        self._end_taking(taking.job.leg, taking)
        return [Failed(taking.job.leg, reason, message, cause=cause)]

    def _end_taking(self, leg: int, taking: _Taking) -> None:
        taking.is_over = True
        self._forget_taken(leg, taking)

    def _forget_taken(self, leg: int, taking: _Taking) -> None:
        if taking.is_over and len(taking.cleared) == self._num_ranks:
            del self._taking[leg]

    def check_invariants(self) -> None:
        self._per_layer.check_invariants()
        assert set(self._leg_of_ticket.values()) == set(self._handing)
        assert not self._handing.keys() & self._taking.keys()
        for taking in self._taking.values():
            assert not (taking.is_over and len(taking.cleared) == self._num_ranks)


def _tokens(
    leg: int,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprob],
    finish: FinishReason | None,
) -> list[Effect]:
    effects: list[Effect] = [Tokens(leg, token_ids, logprobs)] if token_ids else []
    return [*effects, Finished(leg, finish)] if finish else effects
