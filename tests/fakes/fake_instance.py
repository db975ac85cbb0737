"""A fake instance with a real gRPC Session, and scripted behaviour instead of an engine.

Each token is a function of the tokens before it. So a lost, doubled or foreign token changes the
text, and a migrated stream must have the same text as an unbroken stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from pdmesh.core.kv.prefix.block_hash import tokens_from_bytes
from pdmesh.errors import AdapterUnusable, Unavailable
from pdmesh.instance.legs.model_text import ModelTextSource
from pdmesh.net.grpc import rpc
from pdmesh.text_files import TextFiles
from pdmesh.v1 import instance_service_pb2 as pb
from pdmesh.v1.common_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    INSTANCE_PHASE_READY,
    ROLE_DECODE,
    InstanceRecord,
    ModelText,
    PromptLogprobs,
    Role,
    SamplingParams,
    Ticket,
    TokenLogprob,
)

Outbox = asyncio.Queue[pb.SessionResponse | None]  # None breaks the stream
_LETTERS = range(90)  # printable tokens of the tiny tokenizer


def next_token(tokens: Sequence[int], noise: int = 0) -> int:
    total = 7 + noise
    for token in tokens[-8:]:
        total = (total * 31 + token) % 1_000_003
    return _LETTERS[(total + len(tokens)) % len(_LETTERS)]


def noise_of(seed: int | None, position: int) -> int:
    """The noise of a draw with a seed. `position` is the token's position in the answer."""
    return 0 if seed is None else 1 + (seed * 7919 + position * 104_729) % 1_000_003


def reference(prompt: Sequence[int], num_tokens: int, seed: int | None = None) -> list[int]:
    """The tokens of an answer that one instance draws without a break."""
    tokens = list(prompt)
    for position in range(num_tokens):
        tokens.append(next_token(tokens, noise_of(seed, position)))
    return tokens[len(prompt) :]


def prompt_logprobs_of(prompt: Sequence[int], num_top: int) -> PromptLogprobs:
    """Invented log probabilities, in which the tokens 0, 1, ... are the likeliest."""
    found = PromptLogprobs(num_top=num_top)
    for at, token in enumerate(prompt[1:], start=1):
        found.token_ids.extend([token, *range(num_top)])
        found.logprobs.extend([-float(at), *(-0.5 * (1 + top) for top in range(num_top))])
        found.ranks.append(at)
    return found


def seed_of(sampling: SamplingParams) -> int | None:
    return sampling.seed if sampling.HasField("seed") else None


@dataclass(eq=False)
class FakeLeg:
    key: int
    request_id: str
    tokens: list[int]
    num_left: int
    sampling: SamplingParams
    outbox: Outbox
    awaits_first: bool = False  # the decode started before the prefill drew token 1
    ticket_id: str = ""
    prefill: pb.Prefill | None = None  # the prefill's request, until its first token is drawn
    num_drawn: int = 0  # the tokens that this leg has drawn
    script: Sequence[int] = ()

    @property
    def position(self) -> int:
        """The position of the next token in the answer."""
        return self.sampling.num_drawn + self.num_drawn

    def draw(self) -> int:
        if self.script:
            token = self.script[self.position % len(self.script)]
            self.num_drawn += 1
            return token
        token = next_token(self.tokens, noise_of(seed_of(self.sampling), self.position))
        self.num_drawn += 1
        return token


@dataclass(eq=False)
class FakeInstance:
    role: Role.ValueType
    instance_id: str
    incarnation: int = 1
    num_slots: int = 1 << 20
    step_s: float = 0.0
    prefill_s: float = (
        # the time to compute a prompt, after which all sessions get a message about the free slot
        0.0
    )
    group_id: str = "default"
    fingerprint: str = "fp"
    supports_logprobs: bool = False
    supports_constraints: bool = True
    max_model_len: int = 4096
    reject_with: int | None = None  # the RejectReason for every request
    is_silent: bool = False  # the instance never answers
    is_holding: bool = False  # the instance accepts requests but draws no tokens
    fail_starts_with: str | None = None
    # Whether the instance opens the ticket with Accepted if the request asks for per-layer mode.
    is_per_layer: bool = True
    tokens_per_step: int = 1
    breaks_at: int | None = None  # all sessions break when a leg reaches this token
    model: str = "tiny"
    scenario: str = "default"
    text: TextFiles | None = None  # the files of the instance's model
    num_texts: int = 0  # how often these files were requested
    takes_session_hints: bool = False
    # the tokens of every answer, instead of a function of the tokens before
    script: Sequence[int] = ()

    prefills: list[pb.Prefill] = field(default_factory=list)
    starts: list[pb.Start] = field(default_factory=list)
    joins: list[pb.Join] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    session_hints: list[pb.SessionHint] = field(default_factory=list)
    num_rejected: int = 0
    num_sessions: int = 0
    legs: dict[int, FakeLeg] = field(default_factory=dict)
    tickets: set[str] = field(default_factory=set)
    address: str = ""

    _server: grpc.aio.Server | None = None
    _stepper: asyncio.Task[None] | None = None
    _outboxes: list[Outbox] = field(default_factory=list)
    _work: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, port: int = 0) -> InstanceRecord:
        self._server = rpc.server()
        service = pb.DESCRIPTOR.services_by_name["InstanceService"]
        rpc.add_service(self._server, service, self)
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        self.address = f"127.0.0.1:{bound}"
        self._stepper = asyncio.create_task(self._step_often())
        return self.record()

    def record(self) -> InstanceRecord:
        text = self.text
        told = None if text is None else ModelText(digest=text.digest, vocabulary=text.vocabulary)
        service = "decode" if self.role == ROLE_DECODE else "prefill"
        return InstanceRecord(
            instance_id=self.instance_id,
            incarnation=self.incarnation,
            service=service,
            role=self.role,
            group_id=self.group_id,
            scenario=self.scenario,
            grpc_address=self.address,
            model=self.model,
            model_fingerprint=self.fingerprint,
            block_size=16,
            num_slots=min(self.num_slots, 1 << 20),
            max_model_len=self.max_model_len,
            supports_logprobs=self.supports_logprobs,
            supports_constraints=self.supports_constraints,
            engine="fake",
            takes_session_hints=self.takes_session_hints,
            phase=INSTANCE_PHASE_READY,
            text=told,
        )

    async def stop(self) -> None:
        if self._stepper is not None:
            self._stepper.cancel()
        if self._server is not None:
            await self._server.stop(0)

    def break_sessions(self) -> None:
        """Behave as if the process died. Every stream ends, and all legs and tickets are gone."""
        for outbox in self._outboxes:
            outbox.put_nowait(None)
        self.legs.clear()
        self.tickets.clear()

    def free_slots(self, num_slots: int) -> None:
        """Make some slots free, and report the load."""
        self.num_slots, self.reject_with = num_slots, None
        self._tell_load()

    def tell_progress(self, num_signs: int, num_tokens: int, num_open_tokens: int) -> None:
        """Report progress. The fake never does this by itself, like an instance of an older
        release.
        """
        progress = pb.Progress(
            num_signs=num_signs, num_tokens=num_tokens, num_open_tokens=num_open_tokens
        )
        for outbox in self._outboxes:
            outbox.put_nowait(pb.SessionResponse(progress=progress))

    def _tell_load(self) -> None:
        for outbox in self._outboxes:
            outbox.put_nowait(pb.SessionResponse(load=self.load()))

    # --- InstanceService -------------------------------------------------------------------------

    async def Session(
        self,
        requests: AsyncIterator[pb.SessionRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[pb.SessionResponse]:
        self.num_sessions += 1
        outbox: Outbox = asyncio.Queue()
        self._outboxes.append(outbox)
        reader = asyncio.create_task(self._read(requests, outbox))
        try:
            while True:
                message = await outbox.get()
                if message is None:
                    raise Unavailable("scripted break")
                yield message
        finally:
            reader.cancel()
            self._outboxes.remove(outbox)
            for key in [k for k, leg in self.legs.items() if leg.outbox is outbox]:
                del self.legs[key]

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: object
    ) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(record=self.record(), load=self.load())

    async def GetKvSnapshot(
        self, request: pb.GetKvSnapshotRequest, context: object
    ) -> AsyncIterator[pb.GetKvSnapshotResponse]:
        yield pb.GetKvSnapshotResponse(incarnation=self.incarnation)

    async def GetModelText(
        self, request: pb.GetModelTextRequest, context: object
    ) -> AsyncIterator[pb.GetModelTextResponse]:
        self.num_texts += 1
        async for piece in ModelTextSource(self.text).pieces(request.digest):
            yield piece

    async def InspectAdapter(
        self, request: pb.InspectAdapterRequest, context: object
    ) -> pb.InspectAdapterResponse:
        raise AdapterUnusable("it takes no adapters")

    # --- behaviour -------------------------------------------------------------------------------

    async def _read(
        self,
        requests: AsyncIterator[pb.SessionRequest],
        outbox: Outbox,
    ) -> None:
        async for request in requests:
            events: list[pb.SessionEvent] = []
            for command in request.commands:
                self._on_command(command, events, outbox)
            if events:
                outbox.put_nowait(pb.SessionResponse(events=events, load=self.load()))

    def _on_command(
        self,
        command: pb.Command,
        events: list[pb.SessionEvent],
        outbox: Outbox,
    ) -> None:
        match command.WhichOneof("command"):
            case "hello":
                assert command.hello.incarnation == self.incarnation
            case "prefill":
                self.prefills.append(command.prefill)
                if self._admits(command.prefill.key, events, self._early_ticket(command.prefill)):
                    self._prefill(command.prefill, events, outbox)
            case "start":
                self.starts.append(command.start)
                if self._admits(command.start.key, events):
                    self._start(command.start, events, outbox)
            case "join":
                self.joins.append(command.join)
                self._join(command.join, events)
            case "abort":
                self.tickets.discard(f"{self.instance_id}-{command.abort.key}")
                self.aborted.append(command.abort.key)
                self.legs.pop(command.abort.key, None)
            case "session_hint":
                self.session_hints.append(command.session_hint)
            case "release":
                self.released.append(command.release.ticket_id)
                self.tickets.discard(command.release.ticket_id)

    def _admits(
        self, key: int, events: list[pb.SessionEvent], ticket: Ticket | None = None
    ) -> bool:
        if self.is_silent:
            return False
        reason = self.reject_with
        if reason is None and self._num_used >= self.num_slots:
            reason = pb.REJECT_REASON_BUSY
        if reason is not None:
            self.num_rejected += 1
            rejected = pb.Rejected(reason=reason, retry_after_ms=20)  # type: ignore[arg-type]
            events.append(pb.SessionEvent(key=key, rejected=rejected))
            return False
        events.append(pb.SessionEvent(key=key, accepted=pb.Accepted(ticket=ticket)))
        return True

    def _early_ticket(self, prefill: pb.Prefill) -> Ticket | None:
        is_asked = prefill.kv_transfer == pb.KV_TRANSFER_PER_LAYER and not prefill.is_local
        can = self.is_per_layer and prefill.sampling.max_tokens > 1 and not self.is_silent
        return self._ticket(prefill) if is_asked and can else None

    def _ticket(self, prefill: pb.Prefill) -> Ticket:
        ticket_id = f"{self.instance_id}-{prefill.key}"
        return Ticket(
            ticket_id=ticket_id, request_id=prefill.request_id, attempt=prefill.attempt,
            instance_id=self.instance_id, incarnation=self.incarnation,
            model_fingerprint=self.fingerprint, lease_ms=2000,
            num_tokens=len(prefill.prompt_token_ids) // 4,
        )  # fmt: skip

    def finish_prefills(self) -> None:
        """Let all prefills that still wait draw their first token."""
        self.is_holding = False
        for leg in [leg for leg in self.legs.values() if leg.prefill is not None]:
            self._finish_prefill(leg)

    def _finish_prefill(self, leg: FakeLeg) -> None:
        if self.legs.pop(leg.key, None) is None:
            return  # the leg was aborted
        assert leg.prefill is not None
        events: list[pb.SessionEvent] = []
        self._draw_first(leg.prefill, leg, events)
        leg.outbox.put_nowait(pb.SessionResponse(events=events))

    def _join(self, join: pb.Join, events: list[pb.SessionEvent]) -> None:
        leg = self.legs.get(join.key)
        if leg is not None and leg.awaits_first:
            leg.awaits_first = False
            self._take(leg.ticket_id)
            leg.tokens.append(join.first_token_id)
            events.append(_received(leg))
            self._work.set()

    def _prefill(
        self,
        prefill: pb.Prefill,
        events: list[pb.SessionEvent],
        outbox: Outbox,
    ) -> None:
        tokens = list(tokens_from_bytes(prefill.prompt_token_ids))
        leg = FakeLeg(
            prefill.key, prefill.request_id, tokens, prefill.sampling.max_tokens - 1,
            prefill.sampling, outbox, script=self.script,
        )  # fmt: skip
        tokens.append(leg.draw())
        if self._early_ticket(prefill) is not None:
            self.tickets.add(f"{self.instance_id}-{prefill.key}")
        if self.is_holding or self.prefill_s:
            leg.prefill = prefill
            self.legs[prefill.key] = leg
            if not self.is_holding:
                leg.awaits_first = True  # the prefill still computes, so it takes part in no step
                asyncio.get_running_loop().call_later(self.prefill_s, self._finish_prefill, leg)
            return
        self._draw_first(prefill, leg, events)

    def _draw_first(self, prefill: pb.Prefill, leg: FakeLeg, events: list[pb.SessionEvent]) -> None:
        tokens, token = leg.tokens[:-1], leg.tokens[-1]
        leg.awaits_first = False
        first = pb.FirstToken(token_id=token, num_cached_tokens=min(16, len(tokens) // 2))
        if prefill.sampling.HasField("num_logprobs"):
            first.logprob.CopyFrom(_logprob(token, prefill.sampling.num_logprobs))
        if prefill.sampling.HasField("num_prompt_logprobs"):
            prompt = tokens_from_bytes(prefill.prompt_token_ids)
            num_top = prefill.sampling.num_prompt_logprobs
            first.prompt_logprobs.CopyFrom(prompt_logprobs_of(prompt, num_top))
        if leg.num_left == 0:
            first.finish_reason = FINISH_REASON_LENGTH
        elif token in prefill.sampling.stop_token_ids:
            first.finish_reason = FINISH_REASON_STOP
        elif prefill.is_local:
            self.legs[prefill.key] = leg
            self._work.set()
        else:
            ticket = self._ticket(prefill)
            self.tickets.add(ticket.ticket_id)
            first.ticket.CopyFrom(ticket)
        events.append(pb.SessionEvent(key=prefill.key, first_token=first))

    def _start(
        self,
        start: pb.Start,
        events: list[pb.SessionEvent],
        outbox: Outbox,
    ) -> None:
        if self.fail_starts_with is not None:
            failed = pb.Failed(reason=self.fail_starts_with, message="scripted", is_retryable=True)
            events.append(pb.SessionEvent(key=start.key, failed=failed))
            return
        tokens = list(tokens_from_bytes(start.prompt_token_ids))
        if not start.awaits_first_token:
            tokens.append(start.first_token_id)
        leg = FakeLeg(
            start.key, start.request_id, tokens, start.sampling.max_tokens, start.sampling, outbox,
            script=self.script,
        )  # fmt: skip
        leg.awaits_first = start.awaits_first_token
        self.legs[start.key] = leg
        if self.is_holding:
            return
        leg.ticket_id = start.ticket.ticket_id
        if not leg.awaits_first:
            self._take(leg.ticket_id)
            events.append(_received(leg))
            self._work.set()

    def _take(self, ticket_id: str) -> None:
        for holder in self.peers:
            if ticket_id in holder.tickets:
                holder.tickets.remove(ticket_id)
                if holder.prefill_s:
                    holder._tell_load()

    peers: list[FakeInstance] = field(default_factory=list)

    @property
    def _num_used(self) -> int:
        return len(self.legs) + len(self.tickets)

    def load(self) -> pb.Load:
        num_slots = min(self.num_slots, 1 << 20)
        is_busy = self.reject_with == pb.REJECT_REASON_BUSY
        return pb.Load(num_slots=num_slots, num_slots_used=num_slots if is_busy else self._num_used)

    async def _step_often(self) -> None:
        while True:
            if self.is_holding or all(leg.awaits_first for leg in self.legs.values()):
                self._work.clear()
                await self._work.wait()
            await asyncio.sleep(self.step_s)
            self.step()

    def step(self) -> None:
        """Run one step of the batch. A test that sets a long `step_s` calls this itself."""
        messages: dict[int, tuple[Outbox, pb.SessionResponse]] = {}
        for leg in [leg for leg in self.legs.values() if not leg.awaits_first]:
            _, message = messages.setdefault(id(leg.outbox), (leg.outbox, pb.SessionResponse()))
            logprobs: list[TokenLogprob] = []
            has_logprobs = leg.sampling.HasField("num_logprobs")
            reason = FINISH_REASON_LENGTH
            for _ in range(self.tokens_per_step):
                if leg.num_left <= 0:
                    break
                token = leg.draw()
                leg.tokens.append(token)
                leg.num_left -= 1
                message.tokens.keys.append(leg.key)
                message.tokens.token_ids.append(token)
                if has_logprobs:
                    logprobs.append(_logprob(token, leg.sampling.num_logprobs))
                if token in leg.sampling.stop_token_ids:
                    leg.num_left, reason = 0, FINISH_REASON_STOP
            if has_logprobs:
                drawn = pb.LogprobsDrawn(logprobs=logprobs)
                message.events.append(pb.SessionEvent(key=leg.key, logprobs_drawn=drawn))
            if leg.num_left <= 0:
                finished = pb.Finished(finish_reason=reason)
                message.events.append(pb.SessionEvent(key=leg.key, finished=finished))
                del self.legs[leg.key]
        for outbox, message in messages.values():
            message.load.CopyFrom(self.load())
            outbox.put_nowait(message)
        if any(leg.position == self.breaks_at for leg in self.legs.values()):
            self.breaks_at = None
            self.break_sessions()


def _received(leg: FakeLeg) -> pb.SessionEvent:
    received = pb.KvReceived(kv_bytes=64 * len(leg.tokens), duration_us=500)
    return pb.SessionEvent(key=leg.key, kv_received=received)


def _logprob(token: int, num_top: int) -> TokenLogprob:
    top = [token, *range(40, 40 + num_top)][:num_top]
    return TokenLogprob(
        token_id=token,
        logprob=-0.5,
        top_token_ids=top,
        top_logprobs=[-0.5 - i for i in range(len(top))],
    )
