"""The shell of one choice: turns the request core's effects into commands, and what instances say into events.

Tokens are only appended here; their text is made when the writer takes it, all at once, so that a busy stream
costs one pass for many tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog

from pdmesh.core.poison import PoisonBook
from pdmesh.core.request import WAITING, Request
from pdmesh.core.request_types import (
    AbortLeg,
    AskPlan,
    Cancelled,
    ClientGone,
    Complete,
    DecodeTokens,
    Effect,
    EmitTokens,
    Event,
    Fail,
    FinishReason,
    FirstToken,
    ForgetLeg,
    KvReceived,
    LegAccepted,
    LegRejected,
    ReleaseTicket,
    RequestLimits,
    SendJoin,
    SendPrefill,
    SendStart,
    SlotFreed,
    StopMatched,
    Submitted,
    Tick,
    WaitForSlot,
    WaitRefused,
)
from pdmesh.core.retry_budget import RetryBudget
from pdmesh.core.slo import Slos
from pdmesh.errors import MeshError, Overloaded
from pdmesh.v1.common_pb2 import InstanceRecord, SamplingParams, Ticket, TokenLogprob
from pdmesh.v1.instance_service_pb2 import (
    Abort,
    Command,
    Join,
    KvTransfer,
    Prefill,
    Release,
    SessionEvent,
    Start,
)
from pdmesh.v1.scheduler_service_pb2 import PlanQuery
from services.gateway.fleet import Fleet
from services.gateway.planner import Planner
from services.gateway.prompt import Prompt
from services.gateway.sessions import InstanceSession, SessionPool
from services.gateway.spec import CallSpec
from services.gateway.timings import Timings
from services.gateway.tokenizer import TextStream, Tokenizer
from services.gateway.waiting import Waiting

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Collaborators:
    """What every generation of a gateway shares."""

    fleet: Fleet
    sessions: SessionPool
    planner: Planner
    room: Waiting
    tokenizer: Tokenizer
    budget: RetryBudget
    limits: RequestLimits
    slos: Slos
    poison: PoisonBook
    hash_secret: bytes
    next_key: Callable[[], int]
    kv_transfer: Callable[[str], KvTransfer.ValueType]  # of a scenario


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice produced since it was last asked. `is_last` comes once, with a reason or an error."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    is_last: bool = False
    finish_reason: FinishReason | None = None
    error: MeshError | None = None


@dataclass(slots=True)
class Identity:
    """Names of one choice, as instances and the master see it."""

    request_id: str
    index: int
    traceparent: str = ""
    seed: int | None = None
    max_tokens: int = 1
    deadline: float = 0.0


class Generation:
    """One choice of a call. `on_tokens` says that `take` has something, `on_end` that it will not get more."""

    def __init__(
        self,
        shared: Collaborators,
        spec: CallSpec,
        prompt: Prompt,
        identity: Identity,
        on_tokens: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        sampling = spec.sampling
        stop_ids = frozenset() if sampling.ignore_eos else shared.tokenizer.eos_token_ids
        self.core = Request(
            identity.max_tokens,
            limits=shared.slos.limits_for(spec.scenario, len(prompt.tokens)),
            budget=shared.budget,
            next_key=shared.next_key,
            num_prompt_tokens=len(prompt.tokens),
            stop_token_ids=stop_ids,
        )
        self.index = identity.index
        self.timings = Timings()
        self.error: MeshError | None = None
        self._shared = shared
        self._spec = spec
        self.prompt = prompt
        self._identity = identity
        self._stop_ids = sorted(stop_ids)
        self._on_tokens = on_tokens
        self._on_end = on_end
        self._sessions: dict[int, InstanceSession] = {}  # by leg key
        self._ticket: Ticket | None = None
        self._logprobs: list[TokenLogprob] | None = None
        if sampling.num_logprobs is not None:
            self._logprobs = []
        self._text: TextStream = shared.tokenizer.text_stream(sampling.stop)
        self._num_taken = 0
        self._is_last_taken = False
        self._waiting_number: int | None = None
        self._events: deque[Event] = deque()
        self._is_handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    # --- what the client's side calls ------------------------------------------------------------

    def start(self) -> None:
        self.timings.submitted = time.monotonic()
        self._identity.deadline = self.timings.submitted + self._shared.limits.deadline_s
        self.on_event(Submitted())

    @property
    def is_ended(self) -> bool:
        return self.core.outcome is not None

    @property
    def is_stopped(self) -> bool:
        """A stop string was found in its text."""
        return self._text.is_stopped

    def cancel(self, error: MeshError | None = None) -> None:
        """Stop whatever the state and free all it holds. `error` is for the client, if it still listens."""
        if not self.is_ended:
            self.error = error
            self.on_event(ClientGone())

    @property
    def num_completion_tokens(self) -> int:
        return self._text.num_tokens if self._text.is_stopped else len(self.core.emitted)

    def take(self) -> Delta | None:
        """Everything since the last call, as text; None if there is nothing new."""
        if self._is_last_taken:
            return None
        emitted = self.core.emitted
        end = len(emitted) if self._logprobs is None else min(len(emitted), len(self._logprobs))
        begin, self._num_taken = self._num_taken, end
        token_ids = emitted[begin:end]
        text = self._text.feed(token_ids) if token_ids else ""
        if self._text.is_stopped:
            self.on_event(StopMatched())
            token_ids = token_ids[: self._text.num_tokens - begin]
        logprobs = self._logprobs[begin : begin + len(token_ids)] if self._logprobs else ()
        if self.is_ended:
            return self._last(text, token_ids, logprobs)
        if not text and not token_ids:
            return None
        return Delta(self.index, text, token_ids, logprobs)

    def _last(self, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Delta:
        self._is_last_taken = True
        outcome = self.core.outcome
        if self._text.is_stopped:
            return Delta(self.index, text, token_ids, logprobs, True, "stop")
        text += self._text.finish()
        if isinstance(outcome, Complete):
            return Delta(self.index, text, token_ids, logprobs, True, outcome.finish_reason)
        error = outcome.error if isinstance(outcome, Fail) else self.error
        if isinstance(error, Overloaded) and not self.core.emitted:
            said = self._shared.slos.default_text(self._spec.scenario)
            if said is not None:
                return Delta(self.index, said, token_ids, logprobs, True, "stop")
        return Delta(self.index, text, token_ids, logprobs, True, None, error)

    # --- what instances, planner and timers call --------------------------------------------------

    def on_token(self, key: int, token_id: int, now: float) -> None:
        """The hot path: one call for each token of each stream."""
        if self.core.push_token(key, token_id, now):
            self._on_tokens()
        else:
            self.on_event(DecodeTokens(key, (token_id,)))

    def on_logprobs(self, key: int, logprobs: Sequence[TokenLogprob]) -> None:
        if self._logprobs is not None and self.core.is_current(key):
            self._logprobs.extend(logprobs)
            self._on_tokens()

    def on_event(self, event: Event, detail: SessionEvent | None = None) -> None:
        """An effect may cause the next event at once; those queue up behind the one being handled."""
        if detail is not None:
            self._note_detail(event, detail)
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                self._handle(self._events.popleft())
        except Exception:
            log.exception("generation.bug", request_id=self._identity.request_id)
            self._end_by_bug()
        finally:
            self._is_handling = False
        self._arm_timer()

    def _handle(self, event: Event) -> None:
        now = time.monotonic()
        self.timings.note(event, now)
        effects = self.core.handle(event, now)
        if self._waiting_number is not None and self.core.phase not in WAITING:
            self._shared.room.leave(self._waiting_number)
            self._waiting_number = None
        for effect in effects:
            _APPLY[type(effect)](self, effect)

    def _end_by_bug(self) -> None:
        """Whoever told us of the event, a session or the planner, serves others too: only this choice ends."""
        self._events.clear()
        self.error = MeshError("internal error; the server's log has the cause")
        self.core.handle(ClientGone(), time.monotonic())
        if self._waiting_number is not None:
            self._shared.room.leave(self._waiting_number)
            self._waiting_number = None
        for key in list(self._sessions):
            self._abort_leg(AbortLeg(key))  # releases its ticket, too
        self._end(Cancelled())

    def on_slot_freed(self, instance_id: str) -> None:
        self._waiting_number = None  # being called is leaving
        self.on_event(SlotFreed(instance_id))

    def on_evicted(self) -> None:
        self._waiting_number = None
        self.on_event(WaitRefused())

    def _note_detail(self, event: Event, detail: SessionEvent) -> None:
        """What the core does not decide on but commands and traces need."""
        if isinstance(event, LegAccepted) and self.core.is_current(event.key):
            if event.ticket is not None:
                self._ticket = detail.accepted.ticket
        elif isinstance(event, FirstToken) and self.core.is_current(event.key):
            first = detail.first_token
            self._ticket = first.ticket if first.HasField("ticket") else None
            if self._logprobs is not None:
                self._logprobs.append(first.logprob)
        elif isinstance(event, KvReceived):
            received = detail.kv_received
            self.timings.kv_transfer_us = received.duration_us

    # --- effects ---------------------------------------------------------------------------------

    def _ask_plan(self, effect: AskPlan) -> None:
        spec, emitted = self._spec, self.core.emitted
        record = self._shared.fleet.reference(spec.model)
        query = PlanQuery(
            request_id=self._identity.request_id,
            attempt=effect.attempt,
            model=spec.model,
            scenario=spec.scenario,
            block_hashes=self.prompt.hashes(record, emitted) if record else (),
            num_prompt_tokens=len(self.prompt.tokens) + len(emitted),
            max_tokens=self.core.num_remaining,
            chat_id=spec.chat_id,
            excluded_instance_ids=effect.excluded,
            traceparent=self._identity.traceparent,
        )
        self._shared.planner.ask(self, effect.plan, query)

    def _send_prefill(self, effect: SendPrefill) -> None:
        record = self._shared.fleet.record(effect.to.instance_id, effect.to.incarnation)
        if record is None:
            self._refuse(effect.key)
            return
        replayed = self.core.emitted[: effect.num_replayed]
        command = Prefill(
            key=effect.key,
            request_id=self._identity.request_id,
            attempt=effect.attempt,
            prompt_token_ids=self.prompt.with_replayed(replayed),
            block_hashes=self.prompt.hashes(record, replayed),
            sampling=self._sampling(effect.max_tokens),
            remaining_ms=self._remaining_ms(),
            is_local=effect.to.is_local,
            traceparent=self._identity.traceparent,
            cache_salt=self.prompt.root(record.model_fingerprint).hex(),
            kv_transfer=self._shared.kv_transfer(self._spec.scenario or record.scenario),
        )
        self._open_leg(effect.key, record, Command(prefill=command))

    def _send_start(self, effect: SendStart) -> None:
        """After the writer of token 1, which was woken just now: the client need not wait for the hand-over."""
        if effect.is_early:
            self._start_decode(effect)
        else:
            asyncio.get_running_loop().call_soon(self._start_current, effect)

    def _start_current(self, effect: SendStart) -> None:
        if self.core.is_current(effect.key):  # else the client left meanwhile
            self._start_decode(effect)

    def _start_decode(self, effect: SendStart) -> None:
        record = self._shared.fleet.record(effect.to.instance_id, effect.to.incarnation)
        if record is None or self._ticket is None:
            self._refuse(effect.key)
            return
        replayed = self.core.emitted[: effect.num_replayed]
        first_token = 0 if effect.is_early else replayed.pop()
        command = Start(
            key=effect.key,
            request_id=self._identity.request_id,
            attempt=effect.attempt,
            prompt_token_ids=self.prompt.with_replayed(replayed),
            block_hashes=self.prompt.hashes(record, replayed),
            first_token_id=first_token,
            awaits_first_token=effect.is_early,
            ticket=self._ticket,
            sampling=self._sampling(effect.max_tokens),
            remaining_ms=self._remaining_ms(),
            traceparent=self._identity.traceparent,
            cache_salt=self.prompt.root(record.model_fingerprint).hex(),
        )
        self._open_leg(effect.key, record, Command(start=command))

    def _send_join(self, effect: SendJoin) -> None:
        session = self._sessions.get(effect.key)
        if session is not None:
            join = Join(key=effect.key, first_token_id=effect.token_id)
            session.send(Command(join=join))

    def _open_leg(self, key: int, record: InstanceRecord, command: Command) -> None:
        session = self._shared.sessions.session(record)
        if session.open_leg(key, self, command):
            self._sessions[key] = session
        else:
            self._refuse(key)

    def _refuse(self, key: int) -> None:
        """The instance cannot even be asked now: as good as a rejection, and no failure of the request's."""
        self.on_event(LegRejected(key, is_final=True))

    def _sampling(self, max_tokens: int) -> SamplingParams:
        asked = self._spec.sampling
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            seed=self._identity.seed,
            stop_token_ids=self._stop_ids,
            ignore_eos=asked.ignore_eos,
            num_logprobs=asked.num_logprobs,
        )

    def _remaining_ms(self) -> int:
        return max(1, int((self._identity.deadline - time.monotonic()) * 1000))

    def _abort_leg(self, effect: AbortLeg) -> None:
        session = self._sessions.pop(effect.key, None)
        if session is not None:
            session.forget(effect.key)
            session.send(Command(abort=Abort(key=effect.key)))

    def _release(self, effect: ReleaseTicket) -> None:
        session = self._sessions.pop(effect.key, None)
        if session is not None:
            session.forget(effect.key)
            release = Release(key=effect.key, ticket_id=effect.ticket_id)
            session.send(Command(release=release))

    def _forget_leg(self, effect: ForgetLeg) -> None:
        session = self._sessions.pop(effect.key, None)
        if session is not None:
            session.forget(effect.key)

    def _emit(self, effect: EmitTokens) -> None:
        self._on_tokens()

    def _wait(self, effect: WaitForSlot) -> None:
        if self._waiting_number is not None:
            return
        self._waiting_number = self._shared.room.join(
            self, effect.instance_ids, effect.until, self._spec.tenant
        )
        if self._waiting_number is None:
            self.on_event(WaitRefused())

    def _end(self, effect: Effect) -> None:
        self.timings.ended = time.monotonic()
        self._on_end()

    # --- time ------------------------------------------------------------------------------------

    def _arm_timer(self) -> None:
        """One timer, moved only when it would be late: progress makes it early, and then it re-arms itself."""
        if self.core.outcome is not None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            return
        wake_at = self.core.wake_at
        if self._timer is not None:
            if wake_at >= self._timer_at:
                return
            self._timer.cancel()
        self._timer_at = wake_at
        delay = max(0.0, wake_at - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.on_event(Tick())


# Any: each function takes the one effect its key names.
_APPLY: Final[dict[type, Callable[[Generation, Any], None]]] = {
    AskPlan: Generation._ask_plan,
    SendPrefill: Generation._send_prefill,
    SendStart: Generation._send_start,
    SendJoin: Generation._send_join,
    AbortLeg: Generation._abort_leg,
    ReleaseTicket: Generation._release,
    ForgetLeg: Generation._forget_leg,
    EmitTokens: Generation._emit,
    WaitForSlot: Generation._wait,
    Complete: Generation._end,
    Fail: Generation._end,
    Cancelled: Generation._end,
}
