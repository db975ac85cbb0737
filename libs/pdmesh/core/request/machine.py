"""Decides the life of one request (one choice of it): candidates, rejections, migration, deadlines.

`state.py` has what the request holds meanwhile. Every leg has a key that is never used again. So
what an abandoned leg still says finds no owner and is dropped: that is the fence against two
decoders. A rejection is a normal answer and never counts as a failure (S40-S44). A request that
lost a leg is planned again, with the tokens emitted so far appended to its prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from pdmesh.core.model import Tick
from pdmesh.core.request.early_decode import EarlyDecode
from pdmesh.core.request.events import (
    AskPlan,
    Cancelled,
    Candidate,
    ClientGone,
    Complete,
    DecodeTokens,
    Effect,
    EmitTokens,
    EngineWorked,
    Event,
    Fail,
    FirstToken,
    ForgetLeg,
    KvAdvanced,
    KvStage,
    LegAccepted,
    LegFailed,
    LegFinished,
    LegKvReceived,
    LegLost,
    LegRejected,
    PlanFailed,
    PlanReceived,
    SendJoin,
    SendPrefill,
    SendStart,
    SlotFreed,
    StopMatched,
    Submitted,
    WaitForSlot,
    WaitRefused,
)
from pdmesh.core.request.state import OpenTicket, RequestPhase, RequestState
from pdmesh.errors import (
    DeadlineExceeded,
    EngineFailed,
    InstanceLost,
    KvTransferFailed,
    MeshError,
    NoInstance,
    PoisonRequest,
)

_ENGINE_DIED: Final = "ENGINE_DIED"


class Request(RequestState):
    """Only `handle` changes state, and `push_token`, its short cut for one token."""

    __slots__ = ()

    # --- public ----------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What must be done about `event`. An event that no longer means anything has no effect."""
        kind = type(event)
        action = _ALWAYS.get(kind)
        if action is None:
            if isinstance(event, _LEG_EVENTS) and (self._leg is None or event.key != self._leg.key):
                return self._on_foreign_leg(event, now)
            action = _TABLE[self.phase].get(kind)
        if action is None or self.phase is RequestPhase.ENDED:
            return []
        return action(self, event, now)

    def push_token(self, key: int, token_id: int, now: float) -> bool:
        """`DecodeTokens(key, (token_id,))` without the cost. False: use `handle` instead."""
        if key != self._decoding_key:
            return False
        if len(self.emitted) < self._max_tokens:
            self.emitted.append(token_id)
        self._progress_at = now
        return True

    # --- planning --------------------------------------------------------------------------------

    def _on_submitted(self, event: Event, now: float) -> list[Effect]:
        self._deadline = now + self._limits.deadline_s
        self._ttft_by = now + self._limits.ttft_s
        self._budget.earn()
        return self._ask_plan()

    def _ask_plan(self) -> list[Effect]:
        self.phase = RequestPhase.PLANNING
        self._plan += 1
        return [AskPlan(self._plan, self.attempt, tuple(self._excluded))]

    def _on_plan(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, PlanReceived)
        if event.plan != self._plan:
            return []
        self.prompt_compute_s = event.prompt_compute_s
        self._decodes = list(event.decodes[: self._limits.max_candidates])
        self._candidates = self._usable(event.prefills)[: self._limits.max_candidates]
        if not self._candidates:
            return self._no_plan(NoInstance("no prefill and decode that can serve this"), now)
        self._tried = 0
        return self._offer_prefill(now)

    def _usable(self, prefills: Sequence[Candidate]) -> list[Candidate]:
        """Prefills that do both phases, or that have a decode to hand their KV to."""
        if any(c.exclusions for c in self._decodes):
            return [c for c in prefills if c.is_local or c.compatible(self._decodes)]
        pairs = {c.pair for c in self._decodes}
        return [c for c in prefills if c.is_local or c.pair in pairs]

    def _on_plan_failed(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, PlanFailed)
        return self._no_plan(event.error, now) if event.plan == self._plan else []

    def _no_plan(self, error: MeshError, now: float) -> list[Effect]:
        """There is no instance to ask. A request that had one before waits for one to come back."""
        if self._last_error is None or not error.is_retryable:
            return self._end(Fail(error))
        lasting = self._out_of_reach | self._too_small
        if lasting and self._excluded.keys() != lasting.keys():
            if not self._has_asked_again:
                # There is no other pair. Only the prefills whose KV could not be had stay excluded,
                # so that a decode may compute the prompt itself.
                self._excluded, self._has_asked_again = lasting, True
                return self._ask_plan()
        elif self._too_small and not (self._out_of_reach or self.num_migrations):
            return self._end(Fail(self._last_error))  # no larger instance is or was there
        self._excluded = dict(self._too_small)
        self.phase = RequestPhase.WAITING_PLAN
        return self._schedule_retry(now, 0.0)

    # --- prefill ---------------------------------------------------------------------------------

    def _offer_prefill(self, now: float) -> list[Effect]:
        """Ask the next candidate (S43). With none left, wait for one to have a free slot."""
        if self._tried < len(self._candidates):
            return self._send_prefill(self._candidates[self._tried], now)
        return self._wait(RequestPhase.WAITING_PREFILL, self._candidates, self._ttft_by, now)

    def _send_prefill(self, to: Candidate, now: float) -> list[Effect]:
        if now >= self._ttft_by:
            return self._end(Fail(self._overloaded()))
        leg = self._open_leg(to, now)
        self.phase = RequestPhase.PREFILL_OFFERED
        return [SendPrefill(leg.key, to, self.attempt, len(self.emitted), self.num_remaining)]

    def _on_prefill_accepted(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, LegAccepted)
        assert self._leg is not None
        self.phase = RequestPhase.PREFILLING
        self._retry_s = self._limits.retry_s
        self._progress_at = now
        if event.ticket is None or self._leg.to.is_local or self.num_remaining == 1:
            return []
        decodes = self._leg.to.compatible(self._decodes)
        self._early = EarlyDecode(event.ticket, decodes, self._early_start, self._limits.answer_s)
        return self._early.offer(now)

    def _early_start(self, to: Candidate) -> SendStart:
        assert self._early is not None
        ticket_id, num_replayed = self._early.ticket.ticket_id, len(self.emitted)
        max_tokens = self.num_remaining - 1
        return SendStart(
            self._next_key(), to, self.attempt, ticket_id, num_replayed, max_tokens, is_early=True
        )

    def _on_early(self, early: EarlyDecode, event: Event, now: float) -> list[Effect]:
        if isinstance(event, LegFailed) and not event.is_retryable:
            early.handle(event, now)
            return self._end(Fail(event.error))
        effects = early.handle(event, now)
        self._exclude_refusers(early)
        if not early.is_spent:
            return effects
        error = InstanceLost("the decode with the KV went away", reason="UPSTREAM_FAILED")
        return effects + self._lose(error, (), now)

    def _exclude_refusers(self, early: EarlyDecode) -> None:
        """Exclude them from the next plan.

        A master that does not know yet that its only decode is dead would name it until no
        migration is left.
        """
        self._excluded.update((c.instance_id, None) for c in early.refused)

    def _on_prefill_rejected(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, LegRejected)
        effects, to = self._close_leg()
        self.num_rejections += 1
        self._last_error = self._after_rejection(event)
        if event.is_too_long:
            self._too_small[to.instance_id] = None
        if event.is_final or event.is_too_long:
            self._excluded[to.instance_id] = None
            self._candidates = [c for c in self._candidates if c is not to]
            if not self._candidates:
                # The next plan may know others, or an instance that does both phases.
                return effects + self._ask_plan()
        else:
            self._tried += 1
        return effects + self._offer_prefill(now)

    def _on_first_token(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, FirstToken)
        leg = self._leg
        assert leg is not None
        self.prefill_id = leg.to.instance_id
        self._retry_s = self._limits.retry_s
        if not self.emitted:  # else what was cached may include tokens that we emitted
            self.num_cached_tokens = event.num_cached_tokens
        effects: list[Effect] = [EmitTokens(self._append((event.token_id,)))]
        if leg.to.is_local and event.finish_reason is None:
            self.decode_id = leg.to.instance_id
            self._start_decoding(now)
            return effects
        effects += self._close_leg()[0] if event.ticket is None else []
        if event.ticket is not None:
            until = now + event.ticket.lease_s
            self._ticket = OpenTicket(leg.key, leg.to, event.ticket, until)
            self._leg = None
        if event.finish_reason is not None:
            return effects + self._end(Complete(event.finish_reason))
        if self._ticket is None:
            error = EngineFailed("prefill ended with neither a ticket nor a finish reason")
            return effects + self._lose(error, (leg.to.instance_id,), now)
        if self.num_remaining == 0:
            return effects + self._end(Complete("length"))
        self._decodes = leg.to.compatible(self._decodes)
        self._tried = 0
        return effects + (self._adopt_early(event.token_id, now) or self._offer_decode(now))

    def _adopt_early(self, token_id: int, now: float) -> list[Effect]:
        """Let the decode that was started early go on from token 1. Empty if there is none."""
        early, self._early = self._early, None
        if early is None:
            return []
        self.num_rejections += early.num_rejections
        self._decodes = [c for c in self._decodes if c not in early.refused]
        if early.leg is None:
            return []
        self._leg, self._answer_by = early.leg, early.answer_by
        self.phase = RequestPhase.DECODE_OFFERED
        effects: list[Effect] = [SendJoin(early.leg.key, token_id)]
        if early.is_accepted:
            self._on_decode_accepted(LegAccepted(early.leg.key), now)
        return effects + (self._ticket_taken() if early.has_kv else [])

    # --- decode ----------------------------------------------------------------------------------

    def _offer_decode(self, now: float) -> list[Effect]:
        assert self._ticket is not None
        if self._tried < len(self._decodes):
            return self._send_start(self._decodes[self._tried], now)
        if not self._decodes:
            return self._lose(NoInstance("no decode takes new work"), (), now)
        return self._wait(RequestPhase.WAITING_DECODE, self._decodes, self._ticket.until, now)

    def _send_start(self, to: Candidate, now: float) -> list[Effect]:
        assert self._ticket is not None
        leg = self._open_leg(to, now)
        self.phase = RequestPhase.DECODE_OFFERED
        ticket_id = self._ticket.held.ticket_id
        return [
            SendStart(leg.key, to, self.attempt, ticket_id, len(self.emitted), self.num_remaining)
        ]

    def _on_decode_accepted(self, event: Event, now: float) -> list[Effect]:
        assert self._leg is not None
        self.decode_id = self._leg.to.instance_id
        self._start_decoding(now)
        return []

    def _start_decoding(self, now: float) -> None:
        assert self._leg is not None
        self.phase = RequestPhase.DECODING
        self._progress_at, self._kv_stage = now, KvStage.NONE
        self._retry_s = self._limits.retry_s
        self._decoding_key = self._leg.key if self._ticket is None else 0

    def _on_decode_rejected(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, LegRejected)
        effects, to = self._close_leg()
        self.num_rejections += 1
        self._last_error = self._after_rejection(event)
        if event.is_too_long:
            self._too_small[to.instance_id] = None
        if event.is_final or event.is_too_long:
            self._excluded[to.instance_id] = None
            self._decodes = [c for c in self._decodes if c is not to]
        else:
            self._tried += 1
        if self._kv_by < math.inf:
            return effects + self._lose_ticket(now)
        return effects + self._offer_decode(now)

    def _on_kv_advanced(self, event: Event, now: float) -> list[Effect]:
        """A decode waits for its turn to pull, pulls, then waits for a place in a step.

        Each of these may take almost `stall_s`.
        """
        assert isinstance(event, KvAdvanced)
        effects = (
            [] if self.phase is RequestPhase.DECODING else self._on_decode_accepted(event, now)
        )
        if self._ticket is not None and event.stage > self._kv_stage:
            self._kv_stage = event.stage
            self._progress_at = now
        return effects

    def _on_kv_received(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, LegKvReceived)
        effects = (
            [] if self.phase is RequestPhase.DECODING else self._on_decode_accepted(event, now)
        )
        self._progress_at = now
        return effects + self._ticket_taken()

    def _ticket_taken(self) -> list[Effect]:
        if self._ticket is None:
            return []
        assert self._leg is not None
        key, self._ticket, self._kv_by = self._ticket.key, None, math.inf
        self._decoding_key = self._leg.key
        return [ForgetLeg(key)]

    def _on_tokens(self, event: Event, now: float) -> list[Effect]:
        """Tokens prove that decode accepted and has the KV: they may overtake the news of it."""
        assert isinstance(event, DecodeTokens)
        effects = (
            [] if self.phase is RequestPhase.DECODING else self._on_decode_accepted(event, now)
        )
        effects += self._ticket_taken()
        self._progress_at = now
        return [*effects, EmitTokens(self._append(event.token_ids))]

    def _on_finished(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, LegFinished)
        effects, _ = self._close_leg()
        return effects + self._end(Complete(event.finish_reason))

    # --- waiting ---------------------------------------------------------------------------------

    def _wait(
        self, phase: RequestPhase, on: Sequence[Candidate], until: float, now: float
    ) -> list[Effect]:
        self.phase = phase
        if now >= self._retry_at or self._retry_at == math.inf:
            self._schedule_retry(now, 0.0)
        is_prefill = phase is RequestPhase.WAITING_PREFILL
        num_tokens = self._num_prompt_tokens + len(self.emitted) if is_prefill else 0
        return [WaitForSlot(tuple(c.instance_id for c in on), until, num_tokens)]

    def _on_slot_freed(self, event: Event, now: float) -> list[Effect]:
        """Offer it to the instance that has a free slot. After another rejection it waits again."""
        assert isinstance(event, SlotFreed)
        is_prefill = self.phase is RequestPhase.WAITING_PREFILL
        on = self._candidates if is_prefill else self._decodes
        for candidate in on:
            if candidate.instance_id == event.instance_id:
                self._tried = len(on)
                send = self._send_prefill if is_prefill else self._send_start
                return send(candidate, now)
        return []

    def _on_wait_refused(self, event: Event, now: float) -> list[Effect]:
        return self._end(Fail(self._overloaded()))

    # --- the engine's own progress ---------------------------------------------------------------

    def _on_engine_worked(self, event: Event, now: float) -> list[Effect]:
        """A silent leg waits for its turn while its engine works, however slowly (S33).

        But its turn must come. An engine that has computed `max_overtaking` times the work it had
        open has forgotten this leg: its work no longer counts as a sign of life.
        """
        assert isinstance(event, EngineWorked)
        if self._turn_of != self._progress_at:  # the first news since its own last progress
            self._turn_of = self._progress_at
            allowed = self._limits.max_overtaking * event.num_open_tokens
            self._turn_by = event.num_tokens + allowed
        if event.num_tokens <= self._turn_by:
            self._worked_at = event.at
        return []

    # --- losing and ending -----------------------------------------------------------------------

    def _on_leg_lost(self, event: Event, now: float) -> list[Effect]:
        self._count_death()
        effects, to = self._close_leg()
        error = InstanceLost("the instance went away", reason="UPSTREAM_FAILED")
        return effects + self._lose(error, (to.instance_id,), now)

    def _on_leg_failed(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, LegFailed)
        if event.error.reason == _ENGINE_DIED:
            self._count_death()
        effects, to = self._close_leg()
        if not event.is_retryable:
            return effects + self._end(Fail(event.error))
        # A transfer that failed may be the fault of either side, or of the link between them (F23).
        holder = (self._ticket.holder.instance_id,) if self._ticket else ()
        if isinstance(event.error, KvTransferFailed):
            self._out_of_reach.update(dict.fromkeys(holder))
        return effects + self._lose(event.error, (to.instance_id, *holder), now)

    def _on_foreign_leg(self, event: Event, now: float) -> list[Effect]:
        """An event of the early decode, the ticket's holder, or a leg given up (the fence)."""
        early = self._early
        if early is not None and isinstance(event, _LEG_EVENTS) and early.owns(event.key):
            return self._on_early(early, event, now)
        ticket = self._ticket
        if ticket is None or not isinstance(event, LegLost | LegFailed) or event.key != ticket.key:
            return []
        if self._leg is None:
            return self._lose_ticket(now)
        # The decode may have all KV, and the news of it be on its way. Then a second prefill would
        # be for nothing (F3).
        self._kv_by = min(self._kv_by, now + self._limits.had_kv_s)
        return []

    def _lose_ticket(self, now: float) -> list[Effect]:
        """The ticket's holder is lost, and no decode has the KV."""
        assert self._ticket is not None
        ticket, self._ticket, self._kv_by = self._ticket, None, math.inf
        error = InstanceLost("the prefill with the KV went away", reason="UPSTREAM_FAILED")
        lost: list[Effect] = [ForgetLeg(ticket.key)]
        return lost + self._lose(error, (ticket.holder.instance_id,), now)

    def _lose(self, error: MeshError, excluded: Sequence[str], now: float) -> list[Effect]:
        """Go on elsewhere with the emitted tokens if the bounds allow it, or end with an error."""
        if self._kv_by < math.inf:
            assert self._ticket is not None
            excluded = (*excluded, self._ticket.holder.instance_id)
        effects = self._drop_all()
        done = self._reason_if_complete()
        if done is not None:
            return effects + self._end(Complete(done))
        if self.num_deaths >= self._limits.max_deaths:
            return effects + self._end(Fail(PoisonRequest("instances died of this request")))
        if self.num_migrations >= self._limits.max_migrations or not self._budget.spend():
            return effects + self._end(Fail(error))
        self.num_migrations += 1
        self.attempt += 1
        self._last_error = error
        self._excluded.update(dict.fromkeys(excluded))
        self._ttft_by = min(self._deadline, now + self._limits.ttft_s)
        self._retry_s, self._retry_at = self._limits.retry_s, math.inf
        self._has_asked_again = False
        return effects + self._ask_plan()

    def _on_client_gone(self, event: Event, now: float) -> list[Effect]:
        return self._end(Cancelled())

    def _on_stop_matched(self, event: Event, now: float) -> list[Effect]:
        return self._end(Complete("stop"))

    def _on_tick(self, event: Event, now: float) -> list[Effect]:
        if now < self.wake_at:
            return []
        if now >= self._deadline:
            return self._end(Fail(DeadlineExceeded("the request took too long")))
        if now >= self._kv_by:
            return self._lose_ticket(now)
        match self.phase:
            case RequestPhase.PLANNING:
                return self._end(Fail(self._last_error or self._overloaded()))
            case RequestPhase.PREFILL_OFFERED if now < self._answer_by:
                return self._end(Fail(self._last_error or self._overloaded()))  # in time, too (S44)
            case RequestPhase.PREFILL_OFFERED | RequestPhase.DECODE_OFFERED | RequestPhase.DECODING:
                return self._on_silence(now)
            case RequestPhase.PREFILLING:
                is_late = now >= self._silent_at or self._early is None
                return self._on_silence(now) if is_late else self._early_tick(now)
            case RequestPhase.WAITING_PREFILL | RequestPhase.WAITING_PLAN:
                return self._on_waited(now)
            case RequestPhase.WAITING_DECODE:
                return self._on_waited_decode(now)
        return []

    def _on_silence(self, now: float) -> list[Effect]:
        assert self._leg is not None
        error = InstanceLost("the instance fell silent", reason="UPSTREAM_FAILED")
        return self._lose(error, (self._leg.to.instance_id,), now)

    def _early_tick(self, now: float) -> list[Effect]:
        assert self._early is not None
        effects = self._early.tick(now)
        self._exclude_refusers(self._early)
        return effects

    def _on_waited(self, now: float) -> list[Effect]:
        if now >= self._ttft_by:
            return self._end(Fail(self._last_error or self._overloaded()))
        self._retry_at, self._has_asked_again = math.inf, False
        return self._ask_plan()

    def _on_waited_decode(self, now: float) -> list[Effect]:
        assert self._ticket is not None
        if now >= self._ticket.until:
            return self._lose(self._overloaded(), (), now)
        self._tried, self._retry_at = 0, math.inf
        return self._offer_decode(now)


_LEG_EVENTS: Final = (
    LegAccepted,
    LegRejected,
    FirstToken,
    KvAdvanced,
    LegKvReceived,
    DecodeTokens,
    LegFinished,
    LegFailed,
    LegLost,
    EngineWorked,
)

_Action = Callable[[Request, Event, float], list[Effect]]

_ALWAYS: Final[dict[type, _Action]] = {
    ClientGone: Request._on_client_gone,
    StopMatched: Request._on_stop_matched,
    Tick: Request._on_tick,
}

_LOSSES: Final[dict[type, _Action]] = {
    LegFailed: Request._on_leg_failed,
    LegLost: Request._on_leg_lost,
}

_WORK: Final[dict[type, _Action]] = {EngineWorked: Request._on_engine_worked}

_DECODE: Final[dict[type, _Action]] = {
    KvAdvanced: Request._on_kv_advanced,
    LegKvReceived: Request._on_kv_received,
    DecodeTokens: Request._on_tokens,
    LegFinished: Request._on_finished,
    **_LOSSES,
}

_WAIT: Final[dict[type, _Action]] = {
    SlotFreed: Request._on_slot_freed,
    WaitRefused: Request._on_wait_refused,
}

_TABLE: Final[dict[RequestPhase, dict[type, _Action]]] = {
    RequestPhase.NEW: {Submitted: Request._on_submitted},
    RequestPhase.PLANNING: {PlanReceived: Request._on_plan, PlanFailed: Request._on_plan_failed},
    RequestPhase.WAITING_PLAN: {},
    RequestPhase.PREFILL_OFFERED: {
        LegAccepted: Request._on_prefill_accepted,
        LegRejected: Request._on_prefill_rejected,
        FirstToken: Request._on_first_token,
        **_LOSSES,
    },
    RequestPhase.WAITING_PREFILL: _WAIT,
    RequestPhase.PREFILLING: {FirstToken: Request._on_first_token, **_WORK, **_LOSSES},
    RequestPhase.DECODE_OFFERED: {
        LegAccepted: Request._on_decode_accepted,
        LegRejected: Request._on_decode_rejected,
        **_DECODE,
    },
    RequestPhase.WAITING_DECODE: _WAIT,
    RequestPhase.DECODING: {**_DECODE, **_WORK},
    RequestPhase.ENDED: {},
}
