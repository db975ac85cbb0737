"""Produces one choice of a call: one answer to one prompt.

`core.request.machine.Request` makes the decisions and does no I/O. A `Generation` passes events to
a `Request` and carries out the effects that this returns, for example by sending commands to
instances. A leg is the choice's stay on one instance, under a key that is never used again. A plan
names the candidates, the instances to which the choice may go. If all candidates reject a choice,
the choice waits in the gateway's waiting room, and counts as queued in its scenario (kind of
requests). An endpoint picker is a service in front of the gateways, which may get the plan from the
master before the gateway does.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from pdmesh.core.kv.prefix.kept_hashes import KeptHashes
from pdmesh.core.model import Tick
from pdmesh.core.placement.plan import DEFAULT_SCENARIO
from pdmesh.core.request.events import (
    AbortLeg,
    AskPlan,
    Cancelled,
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
    FirstToken,
    ForgetLeg,
    LeaveQueue,
    LeaveRoom,
    LegKvReceived,
    LegRejected,
    ReleaseTicket,
    RequestLimits,
    SendJoin,
    SendPrefill,
    SendStart,
    SlotFreed,
    StopMatched,
    Submitted,
    WaitForSlot,
    WaitRefused,
)
from pdmesh.core.request.machine import Request
from pdmesh.core.request.poison import PoisonBook
from pdmesh.core.request.retry_budget import RetryBudget
from pdmesh.core.request.slo import Slos
from pdmesh.errors import ConstraintUnsatisfiable, ImageUnusable, MeshError, Overloaded
from pdmesh.services.gateway.images.encoding import EncodeLeg, Encoder, find_encoder
from pdmesh.services.gateway.images.loading import Images
from pdmesh.services.gateway.parsing.answer_parsing import AnswerParsers
from pdmesh.services.gateway.request.answer_kv import AnswerKv
from pdmesh.services.gateway.request.leg_commands import ChoiceIdentity, LegCommands
from pdmesh.services.gateway.request.spec import CallSpec
from pdmesh.services.gateway.request.timings import Timings
from pdmesh.services.gateway.request.waiting import Waiting
from pdmesh.services.gateway.routing.fleet import FleetView
from pdmesh.services.gateway.routing.handed_plans import HandedPlans
from pdmesh.services.gateway.routing.planner import Planner
from pdmesh.services.gateway.routing.session_hints import SessionHints
from pdmesh.services.gateway.routing.sessions import InstanceSession, SessionPool
from pdmesh.services.gateway.text.choice_text import ChoiceText, TextDelta
from pdmesh.services.gateway.text.grammar_checks import GrammarChecks
from pdmesh.services.gateway.text.grammar_process import GrammarProcess
from pdmesh.services.gateway.text.prompt import Prompt
from pdmesh.services.gateway.text.tokenizer_pool import TokenizerPool
from pdmesh.v1.common_pb2 import InstanceRecord, TokenLogprob
from pdmesh.v1.instance_service_pb2 import (
    Abort,
    Command,
    Join,
    KvTransfer,
    Release,
    SessionEvent,
)

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Collaborators:
    """The objects that all generations of a gateway share."""

    fleet: FleetView
    sessions: SessionPool
    planner: Planner
    room: Waiting
    tokenizers: TokenizerPool
    budget: RetryBudget
    limits: RequestLimits
    slos: Slos
    poison: PoisonBook
    hash_secret: bytes
    next_key: Callable[[], int]
    kv_transfer: Callable[[str], KvTransfer.ValueType]  # takes a scenario's name
    parsers: AnswerParsers
    images: Images
    answer_kv: AnswerKv
    session_hints: SessionHints
    grammars: GrammarChecks = field(default_factory=lambda: GrammarChecks(GrammarProcess()))
    kept_hashes: KeptHashes = field(default_factory=KeptHashes)
    handed_plans: HandedPlans | None = None  # None if plans of endpoint pickers are not used

    def refusal(self, spec: CallSpec, num_prompt_tokens: int) -> Overloaded | None:
        """The reason why a choice must not join its scenario's queue. None if it may join."""
        scenario, tenant = spec.scenario or DEFAULT_SCENARIO, spec.tenant
        limits = self.slos.limits_for(spec.scenario, num_prompt_tokens)
        can_evict = self.room.yields_to(tenant)
        return self.planner.refusal(scenario, tenant.priority, limits.ttft_s, can_evict)


class Generation:
    """One choice of a call.

    It calls `on_tokens` when there is output for `take`, and `on_end` when the choice has ended.
    """

    def __init__(
        self,
        shared: Collaborators,
        spec: CallSpec,
        prompt: Prompt,
        identity: ChoiceIdentity,
        on_tokens: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        sampling = spec.sampling
        end_ids = sampling.end_ids(spec.tokenizer.eos_token_ids)
        self.core = Request(
            identity.max_tokens,
            limits=shared.slos.limits_for(spec.scenario, len(prompt.tokens)),
            budget=shared.budget,
            next_key=shared.next_key,
            num_prompt_tokens=len(prompt.tokens),
            stop_token_ids=end_ids,
        )
        self.index = identity.index
        self.timings = Timings()
        self.error: MeshError | None = None
        self._shared = shared
        self._spec = spec
        self.prompt = prompt
        self._identity = identity
        self._commands = LegCommands(spec, prompt, identity, sorted(end_ids))
        self._on_tokens = on_tokens
        self._on_end = on_end
        self._sessions: dict[int, InstanceSession] = {}  # by leg key
        self._encodings: dict[int, EncodeLeg] = {}  # of images, by the key of the prefill leg
        self._text = ChoiceText(
            identity.index,
            spec.tokenizer.text_stream(prompt.tokens, sampling.text_rules(end_ids)),
            has_logprobs=sampling.num_logprobs is not None,
            default_text=shared.slos.default_text(spec.scenario),
            repeated=sampling.repeated_end(end_ids, identity.max_tokens),
        )
        self._waiting_number: int | None = None  # the choice's place in the waiting room
        self._is_queued = False  # the choice is counted in the scenario's queue
        self._events: deque[Event] = deque()
        self._effects: deque[Effect] = deque()
        self._is_running = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    # --- called for the client -------------------------------------------------------------------

    def start(self) -> None:
        self.timings.submitted = time.monotonic()
        self._identity.deadline = self.timings.submitted + self._shared.limits.deadline_s
        self.on_event(Submitted(self._refusal()))

    @property
    def is_ended(self) -> bool:
        return self.core.outcome is not None

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string or a repetition in the text ended the choice."""
        return self._text.is_stopped

    def cancel(self, error: MeshError | None = None) -> None:
        """Stop the choice in any state, and free all its resources.

        If the client still waits for output, it gets `error`.
        """
        if not self.is_ended:
            self.error = error
            self.on_event(ClientGone())

    def detach(self) -> None:
        """Drop the call's callbacks, which are no longer needed.

        They are part of a reference cycle. Without the cycle, the call and its choices are freed at
        once and need no garbage collection.
        """
        self._on_tokens = self._on_end = unheard

    @property
    def num_completion_tokens(self) -> int:
        return self._text.num_tokens(len(self.core.emitted))

    @property
    def num_taken_tokens(self) -> int:
        """The number of tokens that `take` has returned for the client."""
        return self._text.num_taken

    @property
    def is_failed(self) -> bool:
        return self.error is not None or isinstance(self.core.outcome, Fail)

    def take(self) -> TextDelta | None:
        """All output since the last `take`, as text. None if there is nothing new."""
        taken = self._text.take(self.core.emitted)
        if taken is None:
            return None
        if self._text.is_stopped:
            self.on_event(StopMatched())
        if self.is_ended:
            is_empty = not self.core.emitted
            return self._text.last(
                taken,
                self._told(self.core.outcome),
                self.error,
                is_empty=is_empty,
                stop_token=self._stop_token(),
            )
        return taken if taken.text or taken.token_ids else None

    def _told(
        self, outcome: Complete | Fail | Cancelled | None
    ) -> Complete | Fail | Cancelled | None:
        """The outcome as the client gets it.

        If a constraint or an image caused the failure, the error names the field of the request
        that set it. Instances do not know this field.
        """
        constraint = self._spec.sampling.constraint
        if isinstance(outcome, Fail) and isinstance(outcome.error, ImageUnusable):
            message = "an image of the messages cannot be decoded or processed: is it damaged?"
            return Fail(ImageUnusable(message, field=self._spec.field_of_prompt))
        if constraint is None or not isinstance(outcome, Fail):
            return outcome
        if not isinstance(outcome.error, ConstraintUnsatisfiable):
            return outcome
        field = constraint.asked_by
        message = (
            f"{field} allows no token together with the other fields of the request, or has become "
            "too complex"
        )
        return Fail(ConstraintUnsatisfiable(message, field=field))

    def _stop_token(self) -> int | None:
        """The stop token that ended the choice.

        None if no stop token ended it, or, as in vLLM, if the token is the tokenizer's end token.
        """
        outcome = self.core.outcome
        if not (isinstance(outcome, Complete) and outcome.finish_reason == "stop"):
            return None
        if not self.core.emitted:
            return None
        last, sampling = self.core.emitted[-1], self._spec.sampling
        is_own_end = last == self._spec.tokenizer.eos_token_id and not sampling.ignore_eos
        return None if is_own_end else last

    # --- called by instance sessions, planner and timers -----------------------------------------

    def on_token(self, key: int, token_id: int, now: float) -> None:
        """Take one token. This is the hot path: it runs once for each token of each stream."""
        if self.core.push_token(key, token_id, now):
            self._on_tokens()
        else:
            self.on_event(DecodeTokens(key, (token_id,)))

    def on_logprobs(self, key: int, logprobs: Sequence[TokenLogprob]) -> None:
        if self.core.is_current(key):
            self._text.add_logprobs(logprobs)
            self._on_tokens()

    def on_event(self, event: Event, detail: SessionEvent | None = None) -> None:
        """Handle an event. If its effects cause further events, these are handled afterwards.

        `detail` is the message that the event was made from, if any.
        """
        if detail is not None:
            self._note_detail(event, detail)
        self._events.append(event)
        if not self._is_running:
            self._run()

    def _run(self) -> None:
        """Handle all events in order, and carry out the effects of each before the next one."""
        self._is_running = True
        try:
            while (not self._effects or self._carry_out()) and self._events:
                event, now = self._events.popleft(), time.monotonic()
                self.timings.note(event, now)
                self._effects.extend(self.core.handle(event, now))
        except Exception:
            request_id, last = self._identity.request_id, str(self.core.recorder)
            log.exception("generation.bug", request_id=request_id, last_events=last)
            self._end_by_bug()
        finally:
            self._is_running = False
        self._arm_timer()

    def _carry_out(self) -> bool:
        """Carry out effects. Return False if the rest must wait for the event loop.

        After token 1, the effect SendStart, which begins the decode, waits for the next iteration
        of the loop. So the client gets token 1 before this process prepares the hand-over.
        """
        while self._effects:
            effect = self._effects.popleft()
            _APPLY[type(effect)](self, effect)
            is_first = isinstance(effect, EmitTokens) and not self._events
            if is_first and self._effects and isinstance(self._effects[0], SendStart):
                asyncio.get_running_loop().call_soon(self._run)
                return False
        return True

    def _end_by_bug(self) -> None:
        """End only this choice, and raise nothing, because the caller also serves other choices."""
        self._events.clear()
        self._effects.clear()
        self.error = MeshError("internal error; the server's log has the cause")
        self.core.handle(ClientGone(), time.monotonic())
        self._leave_queue(LeaveQueue())
        self._leave_room(LeaveRoom())
        for key in list(self._sessions):
            self._abort_leg(AbortLeg(key))  # the instance then also releases the leg's KV
        self._end(Cancelled())

    def on_slot_freed(self, instance_id: str) -> None:
        self._waiting_number = None  # the waiting room has already removed this choice
        self.on_event(SlotFreed(instance_id))

    def on_evicted(self) -> None:
        self._waiting_number = None
        self.on_event(WaitRefused())

    def _note_detail(self, event: Event, detail: SessionEvent) -> None:
        """Note the details that the text and the traces need but the core does not."""
        if isinstance(event, FirstToken) and self.core.is_current(event.key):
            if self._text.has_logprobs:
                self._text.add_logprobs((detail.first_token.logprob,))
            if detail.first_token.HasField("prompt_logprobs"):
                self._text.prompt_logprobs = detail.first_token.prompt_logprobs
        elif isinstance(event, LegKvReceived):
            self.timings.kv_transfer_us = detail.kv_received.duration_us

    # --- effects ---------------------------------------------------------------------------------

    def _ask_plan(self, effect: AskPlan) -> None:
        core = self.core
        reference = self._shared.fleet.reference(self._spec.base_model)
        query = self._commands.plan_query(effect, reference, core.emitted, core.num_remaining)
        if not self.timings.asked and self.index == 0:
            self._shared.answer_kv.prompted(self._spec, self.prompt)
        self.timings.asked = self.timings.asked or time.monotonic()
        handed, self._identity.handed = self._identity.handed, None
        vocabulary = self._spec.tokenizer.vocabulary
        self._shared.planner.ask(self, effect.plan, query, vocabulary, handed)

    def _refusal(self) -> Overloaded | None:
        """The reason why the choice must not be queued. None if it may be queued.

        A choice with a plan from an endpoint picker may always be queued, because the picker has
        already checked the queue.
        """
        if self._identity.handed is not None:
            return None
        return self._shared.refusal(self._spec, len(self.prompt.tokens))

    @property
    def _scenario(self) -> str:
        return self._spec.scenario or DEFAULT_SCENARIO

    def _send_prefill(self, effect: SendPrefill) -> None:
        record = self._shared.fleet.record(effect.to.instance_id, effect.to.incarnation)
        if record is None:
            self._refuse(effect.key)
            return
        session = self._shared.sessions.session(record)
        if not session.has_slot or (self.prompt.images and session.is_full):
            # The instance would probably reject the prompt. When it may have a slot, the waiting
            # room calls `on_slot_freed`. `has_slot` becomes true again if the session gets no
            # report for `TRUST_S`. Images may be megabytes and are never sent to a full instance.
            self.on_event(LegRejected(effect.key))
            return
        kv_transfer = self._shared.kv_transfer(self._spec.scenario or record.scenario)
        encoder = self._encoder_for(record)
        command = self._commands.prefill(
            effect, record, self.core.emitted, kv_transfer, awaits_embeddings=encoder is not None
        )
        self._open_leg(effect.key, record, command)
        if encoder is not None and effect.key in self._sessions:
            self._encode(effect, record, encoder)

    def _encoder_for(self, record: InstanceRecord) -> Encoder | None:
        """The encoder instance for the prompt's images. None if the prefill encodes them itself.

        For a request with an adapter, the prefill encodes the images, because the adapter may
        change how the model reads them.
        """
        if not self.prompt.images or self._spec.adapter is not None:
            return None
        digest = self.prompt.images[0].digest
        return find_encoder(self._shared.fleet, self._shared.sessions, record, digest)

    def _encode(self, effect: SendPrefill, record: InstanceRecord, encoder: Encoder) -> None:
        key = self._shared.next_key()
        leg = self._encodings[effect.key] = EncodeLeg(
            encoder, key, effect.key, self._sessions[effect.key]
        )
        leg.begin(self._commands.encode(key, effect.attempt, record))

    def _send_start(self, effect: SendStart) -> None:
        self.timings.decode_offered(effect.key)
        record = self._shared.fleet.record(effect.to.instance_id, effect.to.incarnation)
        if record is None:
            self._refuse(effect.key)
            return
        command = self._commands.start(
            effect, record, self.core.emitted, self.core.prompt_compute_s
        )
        self._open_leg(effect.key, record, command)

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
        """Tell the core that the instance cannot be asked now.

        This is a rejection, not a failure.
        """
        self.on_event(LegRejected(key, is_final=True))

    def _left(self, key: int) -> InstanceSession | None:
        """Forget a leg and end the encoding of its images. Return the leg's session, if any."""
        if (encoding := self._encodings.pop(key, None)) is not None:
            encoding.end()
        return self._sessions.pop(key, None)

    def _abort_leg(self, effect: AbortLeg) -> None:
        session = self._left(effect.key)
        if session is not None:
            session.forget(effect.key)
            session.send(Command(abort=Abort(key=effect.key)))

    def _release(self, effect: ReleaseTicket) -> None:
        session = self._left(effect.key)
        if session is not None:
            session.forget(effect.key)
            release = Release(key=effect.key, ticket_id=effect.ticket_id)
            session.send(Command(release=release))

    def _forget_leg(self, effect: ForgetLeg) -> None:
        session = self._left(effect.key)
        if session is not None:
            session.forget(effect.key)

    def _emit(self, effect: EmitTokens) -> None:
        self._on_tokens()

    def _wait(self, effect: WaitForSlot) -> None:
        self._waiting_number = self._shared.room.join(
            self, effect.instance_ids, effect.until, self._spec.tenant, effect.num_tokens
        )
        if self._waiting_number is None:
            self.on_event(WaitRefused())

    def _leave_room(self, effect: LeaveRoom) -> None:
        if self._waiting_number is not None:
            self._shared.room.leave(self._waiting_number)
            self._waiting_number = None

    def _enter_queue(self, effect: EnterQueue) -> None:
        self._is_queued = True
        self._shared.room.count(self._scenario, self._spec.tenant.priority, 1)

    def _leave_queue(self, effect: LeaveQueue) -> None:
        if self._is_queued:
            self._is_queued = False
            self._shared.room.count(self._scenario, self._spec.tenant.priority, -1)

    def _end(self, effect: Effect) -> None:
        for encoding in self._encodings.values():
            encoding.end()
        self.timings.ended = time.monotonic()
        self._on_end()
        if isinstance(effect, Complete):
            core = self.core
            self._shared.answer_kv.answered(
                self._spec, self.prompt, core.emitted, core.prefill_id, core.decode_id
            )

    # --- time ------------------------------------------------------------------------------------

    def _arm_timer(self) -> None:
        """Keep one timer, which fires at the core's `wake_at` or earlier.

        Progress moves `wake_at` to a later time. The timer is not replaced in this case. It fires
        too early and is then set again.
        """
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
        self._hear_engine()
        self.on_event(Tick())

    def _hear_engine(self) -> None:
        """Tell the core the last report about the engine that computes this choice."""
        key = self.core.computing_key
        session = self._sessions.get(key) if key is not None else None
        if key is None or session is None:
            return
        worked = session.worked
        if worked is None:
            self.on_event(EngineUnknown(key))
        else:
            self.on_event(EngineWorked(key, worked.at, worked.num_tokens, worked.num_open_tokens))


def unheard() -> None:
    """The callback of a generation whose call needs no notice."""


# The argument's type is Any because each function takes only the effect that is its key.
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
    LeaveRoom: Generation._leave_room,
    EnterQueue: Generation._enter_queue,
    LeaveQueue: Generation._leave_queue,
    Complete: Generation._end,
    Fail: Generation._end,
    Cancelled: Generation._end,
}
