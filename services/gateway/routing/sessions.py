"""The gateway's streams to instances (ADR 0001).

The gateway has one gRPC stream, called Session, to each instance that it uses. All requests share
this stream. A leg is a request's stay on one instance, and each leg has a key.

The writer sends all commands that gather during one iteration of the event loop as one message. It
splits large messages, because a message above gRPC's size limit would end the session. The reader
finds the leg of each token with one dict look-up. When the stream breaks, every leg on it is lost
at once, so that no request waits for a timeout.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import grpc
import structlog

from pdmesh.core.instance.free_slots import FreeSlots
from pdmesh.core.request.events import Event, LegLost, LegRejected
from pdmesh.net.grpc import rpc
from pdmesh.services.gateway.routing.session_events import from_proto
from pdmesh.v1.common_pb2 import InstanceRecord, TokenLogprob
from pdmesh.v1.instance_service_pb2 import (
    Command,
    Hello,
    Load,
    Progress,
    RejectReason,
    SessionEvent,
    SessionRequest,
    SessionResponse,
)
from pdmesh.v1.instance_service_pb2_grpc import InstanceServiceStub

log = structlog.get_logger(__name__)

_EOF: Final = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in grpc-stubs
# With this many waiting commands, no leg is opened: the instance does not read the stream.
_MAX_OUTBOX: Final = 8192
_MAX_HINTED: Final = 256  # with this many waiting commands, hints are dropped
_MESSAGE_BYTES: Final = rpc.MAX_MESSAGE_BYTES // 8  # the bound for commands sent in one message
_FIRST_BACKOFF_S: Final = 0.05
_MAX_BACKOFF_S: Final = 1.0
_BEFORE_TOKENS: Final = frozenset(
    {"accepted", "rejected", "first_token", "kv_advanced", "kv_received"}
)


class LegOwner(Protocol):
    """The object that opened a leg, and that receives all events of the leg."""

    def on_token(self, key: int, token_id: int, now: float) -> None: ...

    def on_event(self, event: Event, detail: SessionEvent | None = None) -> None: ...

    def on_logprobs(self, key: int, logprobs: Sequence[TokenLogprob]) -> None: ...


SlotsFreed = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """When an instance's engine last showed progress, and the counters of its last report."""

    at: float
    num_signs: int
    num_tokens: int
    num_open_tokens: int


class InstanceSession:
    """The stream to one incarnation of an instance.

    The first command opens the stream. After the stream broke, the next command opens it again,
    but not before a delay.
    """

    def __init__(self, record: InstanceRecord, hello: Hello, on_slots_freed: SlotsFreed) -> None:
        self.instance_id = record.instance_id
        self.incarnation = record.incarnation
        self.slots = FreeSlots()
        self._will_tell = False  # the event loop will call `_tell_room`
        self.worked: EngineProgress | None = (
            None  # None before the first report; older releases send no reports
        )
        self._record = record
        self._hello = hello
        self._on_slots_freed = on_slots_freed
        self._legs: dict[int, LegOwner] = {}
        self._outbox: list[Command] = []
        self._has_commands = asyncio.Event()
        self._is_open = False
        self._may_open_at = 0.0
        self._backoff_s = _FIRST_BACKOFF_S
        self._channel: grpc.aio.Channel | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def num_legs(self) -> int:
        return len(self._legs)

    @property
    def has_slot(self) -> bool:
        """Whether to offer the instance a prompt.

        If this is False, `on_slots_freed` is called when the instance may have a slot.
        """
        return self.slots.has_slot(time.monotonic())

    @property
    def is_full(self) -> bool:
        """Whether the instance rejected a leg for lack of room, and has reported no slot since."""
        return self.slots.is_full

    @property
    def is_usable(self) -> bool:
        """Whether the stream is open or may be opened now.

        After a break, it stays closed for a while.
        """
        return self._is_open or time.monotonic() >= self._may_open_at

    # --- commands --------------------------------------------------------------------------------

    def open_leg(self, key: int, owner: LegOwner, command: Command) -> bool:
        """Send the command that begins a leg.

        Return False if the stream is broken now, or if too many commands wait.
        """
        if not self.is_usable or len(self._outbox) >= _MAX_OUTBOX:
            return False
        self._legs[key] = owner
        if command.HasField("prefill"):
            self.slots.offer(key)
        self.send(command)
        return True

    def send(self, command: Command) -> None:
        """Send a command, or drop it if the stream is broken and may not be opened yet.

        The instance does not need the dropped command, because it aborts all legs of a broken
        stream.
        """
        if not self._is_open:
            if time.monotonic() < self._may_open_at:
                return
            self._open()
        self._outbox.append(command)
        self._has_commands.set()

    def hint(self, command: Command) -> None:
        """Send a command that belongs to no leg.

        The command is dropped if the stream is not open or too many commands wait.
        """
        if self._is_open and len(self._outbox) < _MAX_HINTED:
            self.send(command)

    def forget(self, key: int) -> None:
        self._legs.pop(key, None)
        if self.slots.given_up(key):
            self._tell_soon()

    # --- the stream ------------------------------------------------------------------------------

    def _open(self) -> None:
        self._is_open = True
        self._outbox = [Command(hello=self._hello)]
        self._task = asyncio.create_task(self._run(), name=f"session-{self.instance_id}")

    async def _run(self) -> None:
        reason, was_silent = "closed", False
        try:
            if self._channel is None:
                self._channel = rpc.channel_to(self._record)
            # The type is Any because the stubs know only calls that take an iterator of requests.
            stub: Any = InstanceServiceStub(self._channel)
            call = stub.Session()
            writer = asyncio.create_task(self._write(call))
            try:
                await self._read(call)
            finally:
                writer.cancel()
                call.cancel()
        except grpc.aio.AioRpcError as exc:
            reason, was_silent = rpc.failure_of(exc), rpc.is_silence(exc)
        except Exception:
            log.exception("session.bug", instance_id=self.instance_id)
            reason = "BUG"
        finally:
            self._on_broken(reason, was_silent)

    # The type of `call` is Any because grpc-stubs has no type for asyncio calls of generated stubs.
    async def _write(self, call: Any) -> None:
        try:
            while True:
                await self._has_commands.wait()
                self._has_commands.clear()
                await self._write_all(call)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            call.cancel()  # the reader sees the end of the stream and logs the reason

    async def _write_all(self, call: Any) -> None:
        """Send the gathered commands.

        This is a separate function, because local variables of `_write` would keep the last
        commands, with their images, in memory while `_write` waits.
        """
        commands, self._outbox = self._outbox, []
        for some in messages(commands):
            await call.write(SessionRequest(commands=some))

    async def _read(self, call: Any) -> None:
        while True:
            response = await call.read()
            if response is _EOF:
                return
            self._backoff_s = _FIRST_BACKOFF_S
            self._on_response(response)

    def _on_response(self, response: SessionResponse) -> None:
        """Handle the events that precede tokens, then all tokens, then all other events.

        Within each leg, the events happened in this order.
        """
        ends: list[tuple[str, SessionEvent]] = []
        kind: str | None
        legs = self._legs
        for event in response.events:
            kind = event.WhichOneof("event")
            if kind in _BEFORE_TOKENS:
                self._dispatch(kind, event)
            elif kind is not None:
                ends.append((kind, event))
        if response.HasField("tokens"):
            now = time.monotonic()
            tokens = response.tokens
            for key, token_id in zip(tokens.keys, tokens.token_ids, strict=False):
                owner = legs.get(key)
                if owner is not None:
                    owner.on_token(key, token_id, now)
        for kind, event in ends:
            self._dispatch(kind, event)
        if response.HasField("load"):
            self._on_load(response.load)
        if response.HasField("progress"):
            self._on_progress(response.progress)

    def _dispatch(self, kind: str, event: SessionEvent) -> None:
        owner = self._legs.get(event.key)
        if owner is None:
            return  # the gateway has given up the leg, so its output is dropped
        if self.slots.answered(event.key, is_accepted=kind != "rejected"):
            self._tell_soon()
        if kind == "rejected":
            rejected = event.rejected
            self.slots.rejected(time.monotonic(), is_for_now=rejected.retry_after_ms > 0)
            log.debug(
                "leg.rejected",
                instance_id=self.instance_id,
                reason=RejectReason.Name(rejected.reason),
                detail=rejected.detail,
            )
        elif kind == "logprobs_drawn":
            owner.on_logprobs(event.key, event.logprobs_drawn.logprobs)
            return
        fact = from_proto(event, kind)
        if fact is not None:
            owner.on_event(fact, event)

    def _tell_soon(self) -> None:
        """Wake waiting requests soon, because the slot of a prompt may be free again.

        This happens in the next iteration of the event loop. If the gateway gave up the prompt, the
        command that aborts the prompt is in the outbox by then. This command must reach the
        instance before the prompts of the waiting requests.
        """
        if not self._will_tell:
            self._will_tell = True
            asyncio.get_running_loop().call_soon(self._tell_room)

    def _tell_room(self) -> None:
        self._will_tell = False
        if num_new := self.slots.num_unoffered:
            self._on_slots_freed(self.instance_id, num_new)

    def _on_load(self, load: Load) -> None:
        num_free = 0 if load.is_draining else load.num_slots - load.num_slots_used
        if num_new := self.slots.told(num_free, time.monotonic()):
            self._on_slots_freed(self.instance_id, num_new)

    def _on_progress(self, said: Progress) -> None:
        before, at = self.worked, time.monotonic()
        if before is not None and before.num_signs == said.num_signs:
            at = before.at
        self.worked = EngineProgress(at, said.num_signs, said.num_tokens, said.num_open_tokens)

    def _on_broken(self, reason: str, was_silent: bool) -> None:
        self._is_open, self.worked = False, None
        self.slots.broken()
        self._may_open_at = time.monotonic() + self._backoff_s
        self._backoff_s = min(_MAX_BACKOFF_S, self._backoff_s * 2)
        was_reached = not self._is_unreachable()
        lost, self._legs = self._legs, {}
        self._outbox = []
        log.info(
            "session.broken",
            instance_id=self.instance_id,
            reason=reason,
            was_silent=was_silent,
            num_legs=len(lost),
        )
        for key, owner in lost.items():
            # If the gateway could not connect, the request did not kill the instance. So the leg
            # does not end with LegLost, which counts against the prompt as possible poison (F38).
            end = LegLost(key, was_silent) if was_reached else LegRejected(key, is_final=True)
            owner.on_event(end)

    def _is_unreachable(self) -> bool:
        """Whether connecting failed. If a connection was made and broke, the channel is idle."""
        if self._channel is None:
            return True
        return self._channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close(None)


def messages(commands: Sequence[Command]) -> Sequence[Sequence[Command]]:
    """Distribute commands over messages of bounded size, in their order."""
    if len(commands) < 2:
        return [commands] if commands else []
    cut: list[list[Command]] = [[]]
    num_bytes = 0
    for command in commands:
        size = command.ByteSize()
        if cut[-1] and num_bytes + size > _MESSAGE_BYTES:
            cut.append([])
            num_bytes = 0
        cut[-1].append(command)
        num_bytes += size
    return cut


class SessionPool:
    """The sessions, by instance and incarnation. `session` makes a session at its first use."""

    def __init__(self, gateway_id: str, on_slots_freed: SlotsFreed) -> None:
        self._gateway_id = gateway_id
        self._on_slots_freed = on_slots_freed
        self._sessions: dict[tuple[str, int], InstanceSession] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def session(self, record: InstanceRecord) -> InstanceSession:
        key = (record.instance_id, record.incarnation)
        found = self._sessions.get(key)
        if found is None:
            hello = Hello(
                gateway_id=self._gateway_id,
                instance_id=record.instance_id,
                incarnation=record.incarnation,
            )
            found = self._sessions[key] = InstanceSession(record, hello, self._on_slots_freed)
        return found

    def hint(self, record: InstanceRecord, command: Command) -> None:
        """Send a command that belongs to no leg, if there is an open session to the instance."""
        if (found := self._sessions.get((record.instance_id, record.incarnation))) is not None:
            found.hint(command)

    def num_open(self, instance_id: str, incarnation: int) -> int:
        """The number of this gateway's legs on the instance. 2**30 if the stream is broken."""
        found = self._sessions.get((instance_id, incarnation))
        if found is None:
            return 0
        return found.num_legs if found.is_usable else 1 << 30

    def forget_gone(self, is_known: Callable[[str, int], bool]) -> None:
        """Close the sessions to instances that left the registry.

        A session with legs stays open. A later call closes it.
        """
        for key, session in list(self._sessions.items()):
            if not is_known(*key) and not session.num_legs:
                del self._sessions[key]
                task = asyncio.create_task(session.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    def counts(self) -> tuple[int, int]:
        """The number of sessions, and the number of legs on all of them."""
        return len(self._sessions), sum(s.num_legs for s in self._sessions.values())

    async def close(self) -> None:
        sessions, self._sessions = list(self._sessions.values()), {}
        await asyncio.gather(*(s.close() for s in sessions), *self._closing)
