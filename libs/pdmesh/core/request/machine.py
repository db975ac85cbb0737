"""The state machine of one request in a gateway: plans, rejections, migrations and deadlines.

A request is one choice, that is, one answer of a client's call. A plan names candidate instances
for it. The gateway offers the request to one prefill after another until one accepts, and after
token 1 to the decodes in the same way. A leg is the request's stay on one instance. A ticket is the
right to pull the KV that the prefill has computed. An early decode pulls this KV while the prefill
still computes it. An instance may reject the request. This is a normal answer and never counts as a
failure (S40-S44). A request that lost a leg is planned again, with the tokens emitted so far
appended to its prompt.

Every leg has a key that is never used again. So a late message of an abandoned leg is recognised
and dropped. This fence keeps two decodes from answering one request. `transitions.py` has the table
of phases and events.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final

from pdmesh.core.flight_recorder import FlightRecorder, IllegalEvent, recorded
from pdmesh.core.model import Tick
from pdmesh.core.request.early_decode import EarlyDecode, OpenLeg
from pdmesh.core.request.events import (
    AskPlan,
    Cancelled,
    Candidate,
    ClientGone,
    Complete,
    DecodeTokens,
    Effect,
    EmitTokens,
    EngineUnknown,
    EngineWorked,
    EnterQueue,
    Event,
    Fail,
    FinishReason,
    FirstToken,
    KvAdvanced,
    LeaveQueue,
    LeaveRoom,
    LegAccepted,
    LegEvent,
    LegFailed,
    LegFinished,
    LegKvReceived,
    LegLost,
    LegRejected,
    Loss,
    PlanFailed,
    PlanReceived,
    RequestLimits,
    SendJoin,
    SendPrefill,
    SendStart,
    SlotFreed,
    StopMatched,
    Submitted,
    TicketHeld,
    WaitForSlot,
    WaitRefused,
)
from pdmesh.core.request.leg_silence import LegSilence
from pdmesh.core.request.plan_exclusions import PlanExclusions
from pdmesh.core.request.poison import Deaths, Victim
from pdmesh.core.request.resource_release import Holdings
from pdmesh.core.request.retry_budget import RetryBudget
from pdmesh.core.request.transitions import (
    BESIDE,
    HAS_LEG,
    IMPOSSIBLE,
    TRANSITIONS,
    UNPLACED,
    WAITING,
    RequestPhase,
)
from pdmesh.errors import (
    DeadlineExceeded,
    EngineFailed,
    InstanceLost,
    InvalidRequest,
    KvTransferFailed,
    MeshError,
    NoInstance,
    Overloaded,
    PoisonRequest,
)

_MAX_RETRY_S: Final = 2.0
_MIN_RETRY_S: Final = 0.01
_ENGINE_DIED: Final = "ENGINE_DIED"


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One request. Only `handle` and `push_token`, its fast path for one token, change the state.

    Times are in seconds on the caller's clock. inf means that a time is not set.
    """

    max_tokens: int
    _: KW_ONLY
    limits: RequestLimits
    budget: RetryBudget
    next_key: Callable[[], int]
    num_prompt_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()

    recorder: FlightRecorder = field(default_factory=FlightRecorder, init=False)
    phase: RequestPhase = field(default=RequestPhase.NEW, init=False)
    outcome: Complete | Fail | Cancelled | None = field(default=None, init=False)
    emitted: list[int] = field(default_factory=list, init=False)
    attempt: int = field(default=0, init=False)
    num_rejections: int = field(default=0, init=False)
    num_migrations: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    prefill_id: str = field(default="", init=False)
    decode_id: str = field(default="", init=False)
    prompt_compute_s: float = field(default=0.0, init=False)  # as the last plan predicted
    expected_s: float = field(default=0.0, init=False)  # predicted time from first plan to token 1
    losses: list[Loss] = field(default_factory=list, init=False)  # at most one per attempt

    _plan: int = field(default=0, init=False)
    _candidates: list[Candidate] = field(default_factory=list, init=False)
    _decodes: list[Candidate] = field(default_factory=list, init=False)
    _tried: int = field(default=0, init=False)
    _exclusions: PlanExclusions = field(default_factory=PlanExclusions, init=False)
    _held: Holdings = field(default_factory=Holdings, init=False)
    _keys: set[int] = field(default_factory=set, init=False)  # of all its legs, past ones included
    _leg_began_at: int = field(default=0, init=False)  # tokens emitted before the active leg
    _silence: LegSilence = field(init=False)
    _deaths: Deaths = field(init=False)
    # All prefills of a plan have rejected the request, and no prefill has accepted it since.
    _is_queued: bool = field(default=False, init=False)
    _last_error: MeshError | None = field(default=None, init=False)
    _deadline: float = field(default=math.inf, init=False)
    _ttft_by: float = field(default=math.inf, init=False)
    _answer_by: float = field(default=math.inf, init=False)
    _retry_at: float = field(default=math.inf, init=False)
    _retry_s: float = field(init=False)

    def __post_init__(self) -> None:
        assert self.max_tokens >= 1
        self._silence = LegSilence(self.limits)
        self._deaths = Deaths(self.limits.num_innocent_tokens)
        self._retry_s = self.limits.retry_s

    # --- public ----------------------------------------------------------------------------------

    @recorded
    def handle(self, event: Event, now: float) -> list[Effect]:
        """Handle an event, and return what the caller must do. A late event has no effects.

        Raises IllegalEvent for an event that is impossible in this phase.
        """
        before, kind = self.phase, type(event)
        if before is RequestPhase.ENDED:
            return []
        if isinstance(event, LegEvent) and not self._held.is_active(event.key):
            effects = self._on_beside(event, now)
        elif kind in TRANSITIONS[before]:
            effects = _ACTIONS[kind](self, event, now)
        elif kind in IMPOSSIBLE[before]:
            raise IllegalEvent(f"{kind.__name__} while {before.value}")
        else:
            return []
        return effects if self.phase is before else self._move(before, effects)

    def _move(self, before: RequestPhase, effects: list[Effect]) -> list[Effect]:
        """Prepend the effects of the phase change on the waiting room and the scenario's queue."""
        moves: list[Effect] = []
        if before in WAITING and self.phase not in WAITING:
            moves.append(LeaveRoom())
        if self._is_queued and self.phase not in UNPLACED:
            self._is_queued = False
            moves.append(LeaveQueue())
        if self.phase is RequestPhase.WAITING_PREFILL and not self._is_queued:
            self._is_queued = True
            moves.append(EnterQueue())
        return moves + effects

    def push_token(self, key: int, token_id: int, now: float) -> bool:
        """Handle `DecodeTokens(key, (token_id,))` faster.

        Returns False if the caller must use `handle` instead.
        """
        if key != self._held.decoding_key:
            return False
        if len(self.emitted) < self.max_tokens:
            self.emitted.append(token_id)
        self._silence.progress_at = now
        return True

    @property
    def wake_at(self) -> float:
        """The time at which the caller must send a Tick."""
        match self.phase:
            case RequestPhase.ENDED:
                return math.inf
            case RequestPhase.PLANNING:
                due = self._ttft_by
            case RequestPhase.PREFILL_OFFERED:
                due = min(self._answer_by, self._ttft_by)
            case RequestPhase.DECODE_OFFERED:
                due = min(self._answer_by, self._held.kv_by)
            case RequestPhase.WAITING_PREFILL | RequestPhase.WAITING_PLAN:
                due = min(self._retry_at, self._ttft_by)
            case RequestPhase.WAITING_DECODE:
                assert self._held.ticket is not None
                due = min(self._retry_at, self._held.ticket.until)
            case RequestPhase.DECODING:
                due = min(self._silence.silent_at, self._held.kv_by)
            case RequestPhase.PREFILLING:
                early = self._held.early
                answer_by = early.answer_by if early is not None else math.inf
                due = min(self._silence.silent_at, answer_by)
            case _:
                due = math.inf
        return min(due, self._deadline)

    @property
    def computing_key(self) -> int | None:
        """The key of the active leg if it is accepted. The caller sends `EngineWorked` for it."""
        is_accepted = self.phase in {RequestPhase.PREFILLING, RequestPhase.DECODING}
        return self._held.leg.key if is_accepted and self._held.leg is not None else None

    @property
    def num_remaining(self) -> int:
        return self.max_tokens - len(self.emitted)

    def is_current(self, key: int) -> bool:
        """Whether `key` is the key of the active leg. The output of other legs must be dropped."""
        return self._held.is_active(key)

    def check_invariants(self) -> None:
        held, phase = self._held, self.phase
        assert (held.leg is not None) == (phase in HAS_LEG), phase
        has_ticket = {RequestPhase.DECODE_OFFERED, RequestPhase.WAITING_DECODE}
        if held.ticket is not None:
            assert phase in has_ticket | {RequestPhase.DECODING}, phase
        assert held.early is None or phase is RequestPhase.PREFILLING
        assert held.ticket is not None or phase not in has_ticket, phase
        assert not held.has_lost_holder or (held.leg is not None and held.ticket is not None)
        assert len(self.emitted) <= self.max_tokens
        assert (self.outcome is not None) == (phase is RequestPhase.ENDED)
        assert self.num_migrations <= self.limits.max_migrations
        assert not self._is_queued or phase in UNPLACED
        assert not held.decoding_key or (held.ticket is None and held.is_active(held.decoding_key))

    # --- tokens ----------------------------------------------------------------------------------

    def _append(self, token_ids: Sequence[int]) -> Sequence[int]:
        taken = token_ids[: self.num_remaining]
        self.emitted.extend(taken)
        return taken

    @property
    def num_deaths(self) -> int:
        return len(self._deaths)

    @property
    def deaths_witnessed(self) -> Sequence[Victim]:
        """The instances that died with this request, or none if it has got a token since."""
        return self._deaths.witnessed(len(self.emitted))

    def _reason_if_complete(self) -> FinishReason | None:
        """The finish reason if the answer's last token is emitted, even if no leg has said so."""
        if self.emitted and self.emitted[-1] in self.stop_token_ids:
            return "stop"
        return "length" if self.num_remaining == 0 else None

    # --- planning --------------------------------------------------------------------------------

    def _on_submitted(self, event: Submitted, now: float) -> list[Effect]:
        self._deadline = now + self.limits.deadline_s
        self._ttft_by = now + self.limits.ttft_s
        self.budget.earn()
        return self._ask_plan() if event.refusal is None else self._end(Fail(event.refusal))

    def _ask_plan(self) -> list[Effect]:
        self.phase = RequestPhase.PLANNING
        self._plan += 1
        return [AskPlan(self._plan, self.attempt, self._exclusions.ids)]

    def _on_plan(self, event: PlanReceived, now: float) -> list[Effect]:
        if self._is_old(event):
            return []
        self.prompt_compute_s = event.prompt_compute_s
        if self._plan == 1:
            self.expected_s = event.first_token_s
        self._decodes = list(event.decodes[: self.limits.max_candidates])
        self._candidates = self._usable(event.prefills)[: self.limits.max_candidates]
        if not self._candidates:
            return self._no_plan(NoInstance("no prefill and decode can serve this request"), now)
        self._tried = 0
        return self._offer_prefill(now)

    def _usable(self, prefills: Sequence[Candidate]) -> list[Candidate]:
        """The prefills that do both phases or can hand their KV to a decode of the plan."""
        if any(c.exclusions for c in self._decodes):
            return [c for c in prefills if c.is_local or c.compatible(self._decodes)]
        pairs = {c.pair for c in self._decodes}
        return [c for c in prefills if c.is_local or c.pair in pairs]

    def _is_old(self, event: PlanReceived | PlanFailed) -> bool:
        if event.plan > self._plan:
            raise IllegalEvent(f"plan {event.plan} was not asked for")
        return event.plan < self._plan

    def _on_plan_failed(self, event: PlanFailed, now: float) -> list[Effect]:
        return [] if self._is_old(event) else self._no_plan(event.error, now)

    def _no_plan(self, error: MeshError, now: float) -> list[Effect]:
        """Continue without a plan.

        A request that was rejected or lost a leg may wait for another instance. A new request ends.
        """
        if self._last_error is None or not error.is_retryable:
            return self._end(Fail(error))
        if self._exclusions.narrow():
            return self._ask_plan()
        if self._exclusions.is_size_alone and not self.num_migrations:
            return self._end(Fail(self._last_error))  # no instance is large enough
        self._exclusions.wait()
        self.phase = RequestPhase.WAITING_PLAN
        self._schedule_retry(now)
        return []

    # --- prefill ---------------------------------------------------------------------------------

    def _offer_prefill(self, now: float) -> list[Effect]:
        """Ask the next candidate (S43). If all were asked, wait until one has a free slot."""
        if self._tried < len(self._candidates):
            return self._send_prefill(self._candidates[self._tried], now)
        return self._wait(RequestPhase.WAITING_PREFILL, self._candidates, self._ttft_by, now)

    def _send_prefill(self, to: Candidate, now: float) -> list[Effect]:
        if now >= self._ttft_by:
            return self._end(Fail(self._overloaded()))
        key = self._open_leg(to, now)
        self.phase = RequestPhase.PREFILL_OFFERED
        return [SendPrefill(key, to, self.attempt, len(self.emitted), self.num_remaining)]

    def _open_leg(self, to: Candidate, now: float) -> int:
        key = self._new_key()
        self._held.leg = OpenLeg(key, to)
        self._leg_began_at = len(self.emitted)
        self._answer_by = now + self.limits.answer_s
        return key

    def _new_key(self) -> int:
        key = self.next_key()
        self._keys.add(key)
        return key

    def _on_accepted(self, event: LegAccepted, now: float) -> list[Effect]:
        if self.phase is RequestPhase.DECODE_OFFERED:
            self._start_decoding(now)
            return []
        leg = self._active_leg
        self.phase = RequestPhase.PREFILLING
        self._retry_s = self.limits.retry_s
        self._silence.began(now)
        if event.ticket is None or leg.to.is_local or self.num_remaining == 1:
            return []
        decodes = leg.to.compatible(self._decodes)
        early = EarlyDecode(event.ticket, decodes, self._early_start, self.limits.answer_s)
        self._held.early = early
        return early.offer(now)

    @property
    def _active_leg(self) -> OpenLeg:
        assert self._held.leg is not None
        return self._held.leg

    def _early_start(self, ticket: TicketHeld, to: Candidate) -> SendStart:
        num_replayed, max_tokens = len(self.emitted), self.num_remaining - 1
        return SendStart(
            self._new_key(), to, self.attempt, ticket, num_replayed, max_tokens, is_early=True
        )

    def _on_early(self, early: EarlyDecode, event: Event, now: float) -> list[Effect]:
        if isinstance(event, LegFailed) and not event.is_retryable:
            early.handle(event, now)
            return self._end(Fail(event.error))
        effects = early.handle(event, now)
        self._exclude_refusers(early)
        if not early.is_spent:
            return effects
        error = InstanceLost("the decode with the KV was lost", reason="UPSTREAM_FAILED")
        return effects + self._lose(error, (), now)

    def _exclude_refusers(self, early: EarlyDecode) -> None:
        """Exclude from the next plan the decodes that failed or refused for good.

        Otherwise a master that does not know yet that a decode is dead would plan with it again and
        again, until the limit on migrations is reached.
        """
        self._exclusions.add(c.instance_id for c in early.refused)

    def _on_rejected(self, event: LegRejected, now: float) -> list[Effect]:
        is_decode = self.phase is RequestPhase.DECODE_OFFERED
        effects, to = self._held.close_leg()
        self.num_rejections += 1
        self._last_error = self._after_rejection(event)
        is_lasting = self._exclusions.rejected(to.instance_id, event)
        if not is_lasting:
            self._tried += 1
        if is_decode:
            if is_lasting:
                self._decodes = [c for c in self._decodes if c is not to]
            lost = self._held.has_lost_holder
            return effects + (self._lose_ticket(now) if lost else self._offer_decode(now))
        if is_lasting:
            self._candidates = [c for c in self._candidates if c is not to]
            if not self._candidates:
                # The next plan may have other candidates, or an instance that does both phases.
                return effects + self._ask_plan()
        return effects + self._offer_prefill(now)

    def _on_first_token(self, event: FirstToken, now: float) -> list[Effect]:
        leg = self._active_leg
        self.prefill_id = leg.to.instance_id
        self._retry_s = self.limits.retry_s
        if not self.emitted:  # otherwise the cached tokens may include emitted ones
            self.num_cached_tokens = event.num_cached_tokens
        effects: list[Effect] = [EmitTokens(self._append((event.token_id,)))]
        if leg.to.is_local and event.finish_reason is None:
            self._start_decoding(now)
            return effects
        if event.ticket is not None:
            self._held.turn_into_ticket(event.ticket, now)
        else:
            effects += self._held.close_leg()[0]
        if event.finish_reason is not None:
            return effects + self._end(Complete(event.finish_reason))
        if event.ticket is None:
            error = EngineFailed("prefill ended with neither a ticket nor a finish reason")
            return effects + self._lose(error, (leg.to.instance_id,), now)
        if self.num_remaining == 0:
            return effects + self._end(Complete("length"))
        self._decodes = leg.to.compatible(self._decodes)
        self._tried = 0
        return effects + (self._adopt_early(event.token_id, now) or self._offer_decode(now))

    def _adopt_early(self, token_id: int, now: float) -> list[Effect]:
        """Let the early decode continue from token 1. Returns no effects if there is none."""
        early, self._held.early = self._held.early, None
        if early is None:
            return []
        self.num_rejections += early.num_rejections
        self._decodes = [c for c in self._decodes if c not in early.refused]
        if early.leg is None:
            return []
        self._held.leg, self._answer_by = early.leg, early.answer_by
        self.phase = RequestPhase.DECODE_OFFERED
        effects: list[Effect] = [SendJoin(early.leg.key, token_id)]
        if early.is_accepted:
            self._start_decoding(now)
        return effects + (self._ticket_taken() if early.has_kv else [])

    # --- decode ----------------------------------------------------------------------------------

    def _offer_decode(self, now: float) -> list[Effect]:
        if self._tried < len(self._decodes):
            return self._send_start(self._decodes[self._tried], now)
        if not self._decodes:
            return self._lose(NoInstance("no decode accepts new requests"), (), now)
        assert self._held.ticket is not None
        until = self._held.ticket.until
        return self._wait(RequestPhase.WAITING_DECODE, self._decodes, until, now)

    def _send_start(self, to: Candidate, now: float) -> list[Effect]:
        assert self._held.ticket is not None
        ticket, key = self._held.ticket.held, self._open_leg(to, now)
        self.phase = RequestPhase.DECODE_OFFERED
        return [SendStart(key, to, self.attempt, ticket, len(self.emitted), self.num_remaining)]

    def _start_decoding(self, now: float) -> None:
        """Note that the active leg decodes.

        The leg's first tokens or its KV prove this, even if they arrive before the acceptance.
        """
        leg = self._active_leg
        self.phase = RequestPhase.DECODING
        self.decode_id = leg.to.instance_id
        self._silence.began(now)
        self._retry_s = self.limits.retry_s
        self._held.decoding_key = leg.key if self._held.ticket is None else 0

    def _accepted_by_now(self, now: float) -> None:
        if self.phase is not RequestPhase.DECODING:
            self._start_decoding(now)

    def _on_kv_advanced(self, event: KvAdvanced, now: float) -> list[Effect]:
        self._accepted_by_now(now)
        if self._held.ticket is not None:
            self._silence.kv_advanced(event.stage, now)
        return []

    def _on_kv_received(self, event: LegKvReceived, now: float) -> list[Effect]:
        self._accepted_by_now(now)
        self._silence.progress_at = now
        return self._ticket_taken()

    def _ticket_taken(self) -> list[Effect]:
        self._held.decoding_key = self._active_leg.key
        return self._held.close_ticket()

    def _on_tokens(self, event: DecodeTokens, now: float) -> list[Effect]:
        """Tokens prove that the decode has accepted the leg and has the KV."""
        self._accepted_by_now(now)
        self._silence.progress_at = now
        return [*self._ticket_taken(), EmitTokens(self._append(event.token_ids))]

    def _on_finished(self, event: LegFinished, now: float) -> list[Effect]:
        return self._held.close_leg()[0] + self._end(Complete(event.finish_reason))

    # --- waiting ---------------------------------------------------------------------------------

    def _wait(
        self, phase: RequestPhase, on: Sequence[Candidate], until: float, now: float
    ) -> list[Effect]:
        self.phase = phase
        if now >= self._retry_at or self._retry_at == math.inf:
            self._schedule_retry(now)
        is_prefill = phase is RequestPhase.WAITING_PREFILL
        num_tokens = self.num_prompt_tokens + len(self.emitted) if is_prefill else 0
        return [WaitForSlot(tuple(c.instance_id for c in on), until, num_tokens)]

    def _schedule_retry(self, now: float) -> None:
        self._retry_at = now + max(_MIN_RETRY_S, self._retry_s)
        self._retry_s = min(_MAX_RETRY_S, self._retry_s * 2)

    def _on_slot_freed(self, event: SlotFreed, now: float) -> list[Effect]:
        """Offer the request to the instance with a free slot.

        If that instance rejects it, wait again.
        """
        is_prefill = self.phase is RequestPhase.WAITING_PREFILL
        on = self._candidates if is_prefill else self._decodes
        for candidate in on:
            if candidate.instance_id == event.instance_id:
                self._tried = len(on)
                send = self._send_prefill if is_prefill else self._send_start
                return send(candidate, now)
        return []

    def _on_wait_refused(self, event: WaitRefused, now: float) -> list[Effect]:
        return self._end(Fail(self._overloaded()))

    def _after_rejection(self, event: LegRejected) -> MeshError:
        if event.is_too_long:
            return _too_long(event.detail)
        if event.is_final:
            return NoInstance("no instance accepts new requests")
        return self._overloaded(event.retry_after_s)

    def _overloaded(self, retry_after_s: float = 0.0) -> Overloaded:
        retry_after_ms = max(1000, math.ceil(retry_after_s * 1000))
        return Overloaded("all instances are busy", retry_after_ms=retry_after_ms)

    # --- the engine's own progress ---------------------------------------------------------------

    def _on_engine_worked(self, event: EngineWorked, now: float) -> list[Effect]:
        self._silence.engine_worked(event)
        return []

    def _on_engine_unknown(self, event: EngineUnknown, now: float) -> list[Effect]:
        self._silence.engine_unknown(now)
        return []

    # --- losing and ending -----------------------------------------------------------------------

    def _on_leg_lost(self, event: LegLost, now: float) -> list[Effect]:
        if not event.was_silent:
            self._count_death()
        effects, to = self._held.close_leg()
        error = InstanceLost("the instance was lost", reason="UPSTREAM_FAILED")
        return effects + self._lose(error, (to.instance_id,), now)

    def _count_death(self) -> None:
        to, num_emitted = self._active_leg.to, len(self.emitted)
        victim = (to.instance_id, to.incarnation)
        self._deaths.count(victim, num_emitted - self._leg_began_at, num_emitted)

    def _on_leg_failed(self, event: LegFailed, now: float) -> list[Effect]:
        if event.error.reason == _ENGINE_DIED:
            self._count_death()
        effects, to = self._held.close_leg()
        if not event.is_retryable:
            return effects + self._end(Fail(event.error))
        # A failed transfer may be the fault of either instance, or of their link (F23).
        holder = self._held.holder_ids
        if isinstance(event.error, KvTransferFailed):
            self._exclusions.kv_out_of_reach(holder)
        return effects + self._lose(event.error, (to.instance_id, *holder), now)

    def _on_beside(self, event: LegEvent, now: float) -> list[Effect]:
        """Handle an event of a leg that is not active.

        The leg may be the early decode, or the prefill that holds the ticket. Events of any other
        leg are dropped, because the request has given it up. This is the fence.
        """
        if event.key not in self._keys:
            raise IllegalEvent(f"{type(event).__name__} of leg {event.key}, which it never had")
        if type(event) not in BESIDE[self.phase]:
            return []
        early, ticket = self._held.early, self._held.ticket
        if early is not None and early.owns(event.key):
            return self._on_early(early, event, now)
        if ticket is None or event.key != ticket.key:
            return []
        if self._held.leg is None:
            return self._lose_ticket(now)
        # The decode may have all KV already, although its message has not arrived yet. So wait
        # before a second prefill, which would be wasted (F3).
        self._held.kv_by = min(self._held.kv_by, now + self.limits.had_kv_s)
        return []

    def _lose_ticket(self, now: float) -> list[Effect]:
        """Continue elsewhere, because the ticket's holder is lost and no decode has the KV."""
        holder = self._held.holder_ids
        error = InstanceLost("the prefill with the KV was lost", reason="UPSTREAM_FAILED")
        return self._held.close_ticket() + self._lose(error, holder, now)

    def _lose(self, error: MeshError, excluded: Sequence[str], now: float) -> list[Effect]:
        """Start another attempt with the emitted tokens, or end the request.

        The request ends if the answer is complete, or if a limit on deaths, migrations or retries
        is reached. The next attempt avoids the instances in `excluded`.
        """
        if self._held.has_lost_holder:
            excluded = (*excluded, *self._held.holder_ids)
        self.losses.append(Loss(now, tuple(excluded), error.message, len(self.emitted)))
        effects = self._drop_all()
        done = self._reason_if_complete()
        if done is not None:
            return effects + self._end(Complete(done))
        if self.num_deaths >= self.limits.max_deaths:
            return effects + self._end(
                Fail(PoisonRequest("instances died while they worked on this request"))
            )
        if self.num_migrations >= self.limits.max_migrations or not self.budget.spend():
            return effects + self._end(Fail(error))
        self.num_migrations += 1
        self.attempt += 1
        self._last_error = error
        self._exclusions.add(excluded)
        self._exclusions.waited()
        self._ttft_by = min(self._deadline, now + self.limits.ttft_s)
        self._retry_s, self._retry_at = self.limits.retry_s, math.inf
        return effects + self._ask_plan()

    def _drop_all(self) -> list[Effect]:
        if self._held.early is not None:
            self.num_rejections += self._held.early.num_rejections
        return self._held.drop_all()

    def _end(self, outcome: Complete | Fail | Cancelled) -> list[Effect]:
        effects = self._drop_all()
        self.phase = RequestPhase.ENDED
        self.outcome = outcome
        return [*effects, outcome]

    def _on_client_gone(self, event: ClientGone, now: float) -> list[Effect]:
        return self._end(Cancelled())

    def _on_stop_matched(self, event: StopMatched, now: float) -> list[Effect]:
        return self._end(Complete("stop"))

    def _on_tick(self, event: Tick, now: float) -> list[Effect]:
        if now < self.wake_at:
            return []
        if now >= self._deadline:
            return self._end(Fail(DeadlineExceeded("the request took too long")))
        if now >= self._held.kv_by:
            return self._lose_ticket(now)
        match self.phase:
            case RequestPhase.PLANNING:
                return self._end(Fail(self._last_error or self._overloaded()))
            case RequestPhase.PREFILL_OFFERED if now < self._answer_by:
                # The time for the first token is over, so do not wait for this instance (S44).
                return self._end(Fail(self._last_error or self._overloaded()))
            case RequestPhase.PREFILL_OFFERED | RequestPhase.DECODE_OFFERED | RequestPhase.DECODING:
                return self._on_silence(now)
            case RequestPhase.PREFILLING:
                early = self._held.early
                is_late = early is None or now >= self._silence.silent_at
                return self._on_silence(now) if is_late else self._on_early_silence(now)
            case RequestPhase.WAITING_PREFILL | RequestPhase.WAITING_PLAN:
                return self._on_waited(now)
            case RequestPhase.WAITING_DECODE:
                return self._on_waited_decode(now)
        return []

    def _on_silence(self, now: float) -> list[Effect]:
        error = InstanceLost("the instance fell silent", reason="UPSTREAM_FAILED")
        return self._lose(error, (self._active_leg.to.instance_id,), now)

    def _on_early_silence(self, now: float) -> list[Effect]:
        assert self._held.early is not None
        effects = self._held.early.tick(now)
        self._exclude_refusers(self._held.early)
        return effects

    def _on_waited(self, now: float) -> list[Effect]:
        if now >= self._ttft_by:
            return self._end(Fail(self._last_error or self._overloaded()))
        self._retry_at = math.inf
        self._exclusions.waited()
        return self._ask_plan()

    def _on_waited_decode(self, now: float) -> list[Effect]:
        assert self._held.ticket is not None
        if now >= self._held.ticket.until:
            return self._lose(self._overloaded(), (), now)
        self._tried, self._retry_at = 0, math.inf
        return self._offer_decode(now)


def _too_long(detail: str) -> InvalidRequest:
    message = "prompt and max_tokens do not fit on any instance"
    return InvalidRequest(
        f"{message}: {detail}" if detail else message,
        reason="CONTEXT_LENGTH_EXCEEDED",
        field="max_tokens",
    )


# The event has type Any because each function accepts only events of the type that is its key.
_ACTIONS: Final[dict[type, Callable[[Request, Any, float], list[Effect]]]] = {
    Submitted: Request._on_submitted,
    PlanReceived: Request._on_plan,
    PlanFailed: Request._on_plan_failed,
    LegAccepted: Request._on_accepted,
    LegRejected: Request._on_rejected,
    FirstToken: Request._on_first_token,
    KvAdvanced: Request._on_kv_advanced,
    LegKvReceived: Request._on_kv_received,
    DecodeTokens: Request._on_tokens,
    LegFinished: Request._on_finished,
    LegFailed: Request._on_leg_failed,
    LegLost: Request._on_leg_lost,
    EngineWorked: Request._on_engine_worked,
    EngineUnknown: Request._on_engine_unknown,
    SlotFreed: Request._on_slot_freed,
    WaitRefused: Request._on_wait_refused,
    StopMatched: Request._on_stop_matched,
    ClientGone: Request._on_client_gone,
    Tick: Request._on_tick,
}
