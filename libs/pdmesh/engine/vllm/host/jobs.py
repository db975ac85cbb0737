"""Turns the outputs of one vLLM engine and its workers' messages into outputs for the host.

The host is the part of the instance outside the engine. A job is the host's order to prefill or
decode one request. A leg is the request's stay on this instance.

Facts about a job arrive in two ways and in any order: tokens through vLLM, and reports on KV
through the control socket. This module passes the facts on to the host in a fixed order. A ticket,
which is the right to pull one prompt's KV, is announced when every rank has staged the KV or opened
the ticket. A decode's tokens are announced after its KV. A reserved range of memory is given back
when every rank is done with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdmesh.core.kv.layout import compatibility as kv_format
from pdmesh.core.kv.layout.cache_groups import kv_bytes
from pdmesh.core.kv.transfer.ticket import PullFailure
from pdmesh.engine.base import (
    DecodeJob,
    Failed,
    Finished,
    FinishReason,
    KvArrived,
    KvPulling,
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
from pdmesh.engine.vllm.host.job_facts import (
    CancelRequest,
    Drawn,
    Effect,
    Fact,
    Landing,
    ReleaseAtRanks,
    failure_of,
)
from pdmesh.engine.vllm.host.per_layer import PerLayerPrefills
from pdmesh.engine.vllm.host.whole import WholePrefills
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
from pdmesh.errors import KvFormatMismatch, KvTransferFailed


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The fields that all tickets of this engine have in common."""

    instance_id: str
    incarnation: int
    model_fingerprint: str
    addresses: tuple[str, ...]  # one per rank
    kv_bytes_per_token: int  # of one rank; in a pipeline, of the stage that has most layers
    block_size: int
    lease_ms: int
    max_model_len: int
    windows: tuple[int, ...] = ()  # each layer's window in tokens; 0: none; (): no layer has one
    named_group: int = 0  # the cache group whose blocks show which prefixes are cached

    def ticket(self, job: PrefillJob) -> Ticket:
        num_tokens = len(job.prompt)
        block_bytes = self.block_size * self.kv_bytes_per_token
        return Ticket(
            ticket_id=job.ticket_id,
            request_id=job.request_id,
            attempt=job.attempt,
            instance_id=self.instance_id,
            incarnation=self.incarnation,
            model_fingerprint=self.model_fingerprint,
            num_tokens=num_tokens,
            kv_bytes=kv_bytes(num_tokens, self.block_size, block_bytes, self.windows),
            addresses=self.addresses,
            lease_ms=self.lease_ms,
        )


@dataclass(slots=True)
class _Taking:
    """A decode, from its start until it has ended and its landing range is free on all ranks.

    A landing range is the memory that a pull writes to.
    """

    job: DecodeJob
    pulling: set[int] = field(default_factory=set)  # ranks that have begun to pull
    arrived: set[int] = field(default_factory=set)  # ranks that have all bytes
    received: dict[int, Received] = field(default_factory=dict)
    held: list[Drawn] = field(default_factory=list)  # drawn before all ranks reported the KV
    freed: set[int] = field(default_factory=set)  # ranks whose landing range is free
    is_over: bool = False


@dataclass(slots=True)
class _Local:
    job: PrefillJob
    has_first: bool = False


class Jobs:
    """`handle` takes a fact and returns its effects.

    The host starts and aborts jobs by other methods.
    """

    def __init__(self, endpoint: Endpoint, num_ranks: int) -> None:
        self._endpoint, self._num_ranks = endpoint, num_ranks
        self._taking: dict[int, _Taking] = {}
        self._local: dict[int, _Local] = {}
        self._whole = WholePrefills(num_ranks, endpoint.ticket)
        self._per_layer = PerLayerPrefills(num_ranks)

    @property
    def num_open(self) -> int:
        """Legs whose terminal output has not been emitted."""
        taking = sum(not t.is_over for t in self._taking.values())
        return self._whole.num_open + taking + len(self._local) + self._per_layer.num_open

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held for any leg or ticket."""
        return not (self._whole or self._taking or self._local or self._per_layer)

    def prefill(self, job: PrefillJob) -> None:
        if not hands_on(job, self._endpoint.max_model_len):
            self._local[job.leg] = _Local(job)
        elif job.is_per_layer:
            self._per_layer.start(job, self._endpoint.ticket(job))
        else:
            self._whole.start(job)

    def decode(self, job: DecodeJob) -> list[Effect]:
        """Start a decode. If the ticket's KV does not fit this engine, the effects end the leg."""
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

    def refused(self, failed: Failed) -> list[Effect]:
        """End the job of a request that vLLM never took. No worker knows this request."""
        leg = failed.leg
        if self._per_layer.owns(leg):
            return self._per_layer.refused(failed)
        if self._whole.owns(leg):
            return self._whole.refused(failed)
        local, taking = self._local.pop(leg, None), self._taking.pop(leg, None)
        effects: list[Effect] = []
        if (taking and not taking.is_over) or local:
            effects.append(failed)
        if taking:
            effects.append(LandingFreed(leg))
        return effects

    def abort(self, leg: int) -> list[Effect]:
        """The host wants neither the leg nor its ticket any more."""
        if self._per_layer.owns(leg):
            return self._per_layer.abort(leg)
        if (local := self._local.pop(leg, None)) is not None:
            unused = [TicketClosed(local.job.ticket_id, "released")] if local.job.staging else []
            return [CancelRequest(leg), *unused]
        taking = self._taking.get(leg)
        if taking and not taking.is_over:
            self._end_taking(leg, taking)
            return [CancelRequest(leg)]
        return self._whole.abort(leg) if self._whole.owns(leg) else []

    def release(self, ticket_id: str) -> list[Effect]:
        is_known = self._whole.owns_ticket(ticket_id) or self._per_layer.owns_ticket(ticket_id)
        return [ReleaseAtRanks(ticket_id)] if is_known else []

    def awaits_first_token(self, leg: int) -> bool:
        taking = self._taking.get(leg)
        return taking is not None and taking.job.first_token is None and not taking.is_over

    def pull_deadline_s(self, leg: int) -> float:
        """How long the pull of a leg may take, from `KvPulling` on."""
        return self._taking[leg].job.deadline_s

    def overdue(self, leg: int) -> list[Effect]:
        """The leg's pull has reached its deadline. Fail the leg unless all ranks have all bytes."""
        taking = self._taking.get(leg)
        if taking is None or taking.is_over or len(taking.arrived) == self._num_ranks:
            return []
        self._end_taking(leg, taking)
        message = f"{PullFailure.OVERDUE}: the engine did not report the end of the pull in time"
        failed = Failed(leg, KvTransferFailed.default_reason, message, cause=PullFailure.OVERDUE)
        return [failed, CancelRequest(leg)]

    def handle(self, fact: Fact) -> list[Effect]:
        match fact:
            case Drawn():
                return self._on_drawn(fact)
            case RankTicketOpened() | Staged() | StageFailed() | RankTicketClosed():
                return self._on_ticket(fact)
            case Pulling() | Arrived() | Received() | PullFailed() | RankLandingFreed():
                return self._on_landing(fact)

    # tokens

    def _on_drawn(self, drawn: Drawn) -> list[Effect]:
        if (local := self._local.get(drawn.leg)) is not None:
            return self._on_local(local, drawn)
        if (taking := self._taking.get(drawn.leg)) is not None:
            return [] if taking.is_over else self._on_decoded(taking, drawn)
        if self._per_layer.owns(drawn.leg):
            return self._per_layer.drawn(drawn)
        return self._whole.drawn(drawn) if self._whole.owns(drawn.leg) else []

    def _on_local(self, local: _Local, drawn: Drawn) -> list[Effect]:
        leg = drawn.leg
        effects: list[Effect] = []
        tokens, logprobs, finish = drawn.token_ids, drawn.logprobs, drawn.finish_reason
        if drawn.is_error:
            del self._local[leg]
            return [failure_of(drawn)]
        if not local.has_first and tokens:
            local.has_first = True
            ends = finish if len(tokens) == 1 else None
            first = logprobs[0] if logprobs else None
            prefilled = Prefilled(
                leg, tokens[0], None, drawn.num_cached_tokens, ends, first, drawn.prompt_logprobs
            )
            effects = [prefilled]
            tokens, logprobs = tokens[1:], logprobs[1:]
            if ends:
                del self._local[leg]
                return [*effects]
        if finish:
            del self._local[leg]
        return [*effects, *_tokens(leg, tokens, logprobs, finish)]

    def _on_decoded(self, taking: _Taking, drawn: Drawn) -> list[Effect]:
        has_kv = len(taking.received) == self._num_ranks
        if drawn.is_error and (has_kv or drawn.is_constraint_error):
            return self._fail_taking(taking, failure_of(drawn))
        if drawn.is_error:
            reason = KvTransferFailed.default_reason
            return self._fail_taking(taking, Failed(drawn.leg, reason, "vLLM failed the request"))
        if not has_kv:
            taking.held.append(drawn)
            return []
        effects = _tokens(drawn.leg, drawn.token_ids, drawn.logprobs, drawn.finish_reason)
        if drawn.finish_reason:
            self._end_taking(drawn.leg, taking)
        return effects

    # tickets

    def _on_ticket(
        self, fact: RankTicketOpened | Staged | StageFailed | RankTicketClosed
    ) -> list[Effect]:
        if self._per_layer.owns_ticket(fact.ticket_id):
            return [] if isinstance(fact, Staged) else self._per_layer.handle(fact)
        if isinstance(fact, RankTicketOpened) or not self._whole.owns_ticket(fact.ticket_id):
            return []
        return self._whole.handle(fact)

    # landings

    def _on_landing(self, fact: Landing) -> list[Effect]:
        taking = self._taking.get(fact.leg)
        if taking is None:
            return []
        match fact:
            case Pulling():
                taking.pulling.add(fact.rank)
                has_turn = len(taking.pulling) == self._num_ranks
                return [KvPulling(fact.leg)] if has_turn and not taking.is_over else []
            case Arrived():
                taking.arrived.add(fact.rank)
                has_all = len(taking.arrived) == self._num_ranks
                return [KvArrived(fact.leg)] if has_all and not taking.is_over else []
            case Received():
                taking.received[fact.rank] = fact
                return self._on_received(taking)
            case PullFailed():
                if taking.is_over:
                    return []
                failed = Failed(fact.leg, fact.reason, fact.message, cause=fact.cause)
                return self._fail_taking(taking, failed)
            case RankLandingFreed():
                taking.freed.add(fact.rank)
                self._forget_taken(fact.leg, taking)
                return [LandingFreed(fact.leg)] if len(taking.freed) == self._num_ranks else []

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
                max(r.waited_s for r in ranks),
            )
        ]
        held, taking.held = taking.held, []
        for drawn in held:
            effects += self._on_decoded(taking, drawn)
        return effects

    def _fail_taking(self, taking: _Taking, failed: Failed) -> list[Effect]:
        self._end_taking(failed.leg, taking)
        return [failed]

    def _end_taking(self, leg: int, taking: _Taking) -> None:
        taking.is_over = True
        self._forget_taken(leg, taking)

    def _forget_taken(self, leg: int, taking: _Taking) -> None:
        if taking.is_over and len(taking.freed) == self._num_ranks:
            del self._taking[leg]

    def check_invariants(self) -> None:
        self._per_layer.check_invariants()
        self._whole.check_invariants()
        assert not any(self._whole.owns(leg) for leg in self._taking)
        for taking in self._taking.values():
            assert not (taking.is_over and len(taking.freed) == self._num_ranks)


def _tokens(
    leg: int,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprob],
    finish: FinishReason | None,
) -> list[Effect]:
    effects: list[Effect] = [Tokens(leg, token_ids, logprobs)] if token_ids else []
    return [*effects, Finished(leg, finish)] if finish else effects
