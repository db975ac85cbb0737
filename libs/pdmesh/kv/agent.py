"""The transfer agent of one rank: stages KV for others to pull, and pulls from others, on one event loop.

Policy is in `core.ticket_book` and `core.pull_book`; this shell moves bytes and messages. One connection per peer
carries all pulls at once, told apart by pull id. A prompt of at most 64 KiB costs three messages: PULL, META with the
bytes, ACK; a longer one adds one payload per contiguous range.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import structlog
import xxhash

from pdmesh.core import pull_book as rx
from pdmesh.core import ticket_book as tx
from pdmesh.core.arena import ArenaRange
from pdmesh.core.kv_layout import KvLayout
from pdmesh.core.ticket import CloseReason, PullFailure, Ticket
from pdmesh.errors import KvTransferFailed
from pdmesh.kv import wire
from pdmesh.kv.arena_memory import ArenaMemory, HostArena
from pdmesh.kv.connections import ConnectionPool
from pdmesh.kv.transport import ByteArray, KvConnection, KvTransport

log = structlog.get_logger(__name__)

_TICK_S = 0.05
_MAX_PULLS = 1024
_CHECK_ASIDE_BYTES = 8 << 20  # checksums of more than this are computed beside the loop
_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    instance_id: str
    incarnation: int
    model_fingerprint: str
    rank: int = 0


@dataclass(frozen=True, slots=True)
class TicketClosed:
    """Nobody reads the ticket's staging range any more. Once per staged ticket."""

    ticket_id: str
    reason: str  # taken, released, expired, failed


@dataclass(frozen=True, slots=True)
class LandingFreed:
    """No late write can reach the landing range at `offset`. Once per pull that raised or was cancelled."""

    offset: int


AgentEvent = TicketClosed | LandingFreed


@dataclass(frozen=True, slots=True)
class PullResult:
    num_bytes: int
    duration_s: float


class PullHooks:
    """Faults for tests; production passes none. Override what should go wrong."""

    def is_dropped(self, pull_id: int) -> bool:
        """The sender's answer is lost."""
        return False

    def on_received(self, payload: ByteArray) -> None:
        """The bytes landed and are not verified yet."""

    def on_verified(self, payload: ByteArray) -> None:
        """The bytes were verified and are the caller's next."""


@dataclass(slots=True)
class _Staged:
    data: ByteArray
    layout: KvLayout
    checksum: bytes


@dataclass(slots=True)
class _Pull:
    ticket: Ticket
    landing: ByteArray  # the whole range; cut to the bytes that come once META says how many
    offset: int
    first_block: int
    connection: KvConnection
    done: asyncio.Future[int]
    ranges: tuple[wire.Range, ...] = ()
    inline: memoryview | None = None
    num_missing: int = 0


class KvAgent:
    """See the module. All methods on the loop of `start`; `on_event` is called on it too."""

    def __init__(
        self,
        transport: KvTransport,
        identity: AgentIdentity,
        *,
        staging_bytes: int,
        landing_bytes: int,
        on_event: Callable[[AgentEvent], None],
        hooks: PullHooks | None = None,
        staging_arena: ArenaMemory | None = None,
        landing_arena: ArenaMemory | None = None,
        max_peers: int = 256,
    ) -> None:
        self._transport = transport
        self._identity = identity
        self._on_event = on_event
        self._hooks = hooks
        self._staging = staging_arena or HostArena(staging_bytes)
        self._landing = landing_arena or HostArena(landing_bytes)
        self._fingerprint_hash = xxhash.xxh3_64_intdigest(identity.model_fingerprint.encode())
        self._tickets = tx.TicketBook(identity.incarnation, self._fingerprint_hash)
        self._pulls = rx.PullBook()
        self._staged: dict[str, _Staged] = {}
        self._pulling: dict[int, _Pull] = {}
        self._pool = ConnectionPool(transport, max_peers, self._is_busy)
        self._peers: dict[int, KvConnection] = {}  # both directions, by key
        self._num_pulls = 0
        self._tick: asyncio.TimerHandle | None = None
        self._checks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.address = ""  # of the transport, once started
        self._posted: deque[Callable[[], None]] = deque()

    # -- the public door --------------------------------------------------------------------------

    @property
    def num_tickets(self) -> int:
        return len(self._tickets)

    @property
    def num_pulls(self) -> int:
        return len(self._pulls)

    async def start(self) -> str:
        """Open the transport; returns its address. Raises KvTransferFailed."""
        self._loop = asyncio.get_running_loop()
        self.address = await self._transport.start(self)
        return self.address

    def staging(self, r: ArenaRange) -> ByteArray:
        """A view of the staging arena, to gather into."""
        return self._staging.view(r)

    def landing(self, r: ArenaRange) -> ByteArray:
        """A view of the landing arena, to scatter from."""
        return self._landing.view(r)

    def stage(
        self,
        ticket_id: str,
        request_id: str,
        attempt: int,
        r: ArenaRange,
        layout: KvLayout,
        lease_s: float,
    ) -> None:
        """The bytes are in place: compute their checksum and serve pulls until the lease ends.

        Raises ValueError if the ticket is open already, the range is too short or the layout is not ours.
        """
        if layout.fingerprint and layout.fingerprint != self._identity.model_fingerprint:
            raise ValueError("the layout has another model's fingerprint")
        if layout.total_bytes > r.length or layout.num_layers > wire.MAX_RANGES:
            raise ValueError(f"{layout} does not fit {r}")
        data = self._staging.view(ArenaRange(r.offset, layout.total_bytes))
        self._send(tx.Staged(ticket_id, attempt, layout.num_blocks, lease_s))
        self._staged[ticket_id] = _Staged(data, layout, _checksum(data))

    def release(self, ticket_id: str) -> None:
        """Nobody will pull it. TicketClosed follows, at once or when the last send ended."""
        self._send(tx.Released(ticket_id))

    async def prepare(self, address: str, *, deadline_s: float = 5.0) -> None:
        """Connect to a peer before the first pull needs it. Raises KvTransferFailed."""
        connection = await self._pool.get(address, deadline_s)
        self._peers[connection.key] = connection

    async def renew(self, ticket: Ticket, *, deadline_s: float = 5.0) -> None:
        """Ask the sender to keep the bytes for another lease. Not answered: pull to know."""
        connection = await self._pool.get(self._address(ticket), deadline_s)
        message = wire.Renew(ticket.ticket_id, ticket.attempt, ticket.incarnation)
        connection.send(wire.encode(message))

    async def pull(
        self, ticket: Ticket, landing: ArenaRange, *, deadline_s: float, first_block: int = 0
    ) -> PullResult:
        """Pull a ticket's blocks from `first_block` on into the start of `landing`, and verify them.

        The bytes lie there as in the sender's buffer, each layer without its first blocks. Afterwards the
        landing range is the caller's again. Raises KvTransferFailed; then, and when cancelled, the range is
        the agent's until it says LandingFreed.
        """
        started = time.monotonic()
        if first_block == 0 and ticket.kv_bytes > landing.length:
            raise ValueError(f"{ticket.kv_bytes} bytes do not fit {landing}")
        try:
            if self._is_closed:
                raise KvTransferFailed("the KV agent is closing", reason=PullFailure.CLOSING)
            if len(self._pulls) >= _MAX_PULLS:
                raise KvTransferFailed("too many pulls at once", reason=PullFailure.BUSY)
            connection = await self._pool.get(self._address(ticket), deadline_s)
        except BaseException:
            self._on_event(LandingFreed(landing.offset))  # nothing was asked for yet
            raise
        self._peers[connection.key] = connection
        self._num_pulls += 1
        pull_id = self._num_pulls
        done: asyncio.Future[int] = self._loop.create_future()
        target = self._landing.view(landing)
        pull = _Pull(ticket, target, landing.offset, first_block, connection, done)
        self._pulling[pull_id] = pull
        # How many bytes a suffix has follows from the sender's layout, which the ticket does not tell.
        least, most = ticket.kv_bytes, ticket.kv_bytes
        if first_block:
            least, most = 0, min(ticket.kv_bytes, landing.length)
        self._receive(rx.PullRequested(pull_id, connection.key, least, most, started + deadline_s))
        num_bytes = await self._wait(pull_id, pull)
        return PullResult(num_bytes, time.monotonic() - started)

    def give_back(self, landing: ArenaRange) -> None:
        """LandingFreed for a pull that never began, or whose result found nobody to take it."""
        self._on_event(LandingFreed(landing.offset))

    def post(self, what: Callable[[], None]) -> None:
        """Thread-safe: do `what` on the loop, before any message that arrives from now on."""
        self._posted.append(what)
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it all tickets
            self._loop.call_soon_threadsafe(self._do_posted)

    def _do_posted(self) -> None:
        while self._posted:
            self._posted.popleft()()

    async def close(self) -> None:
        """Drop all connections, close all tickets, fail all pulls. Bounded in time, idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        await self._pool.close()
        await self._transport.close()
        if self._checks:
            await asyncio.wait(self._checks, timeout=_CLOSE_S)
        for ticket_id in list(self._staged):
            self._send(tx.Released(ticket_id))
        if self._tick is not None:
            self._tick.cancel()
        self._staging.close()
        self._landing.close()

    def check_invariants(self) -> None:
        self._tickets.check_invariants()
        self._pulls.check_invariants()
        assert len(self._staged) == len(self._tickets)
        assert len(self._pulling) == len(self._pulls)

    # -- the transport's handler ------------------------------------------------------------------

    def on_connected(self, connection: KvConnection) -> None:
        self._peers[connection.key] = connection

    def on_closed(self, connection: KvConnection, reason: str) -> None:
        self._peers.pop(connection.key, None)
        self._pool.remove(connection)
        self._send(tx.PeerLost(connection.key))
        self._receive(rx.PeerLost(connection.key))

    def on_message(self, connection: KvConnection, message: memoryview) -> None:
        if self._posted:  # a ticket staged from another thread may be what this message asks for
            self._do_posted()
        peer = connection.key
        try:
            parsed = wire.parse(message)
        except wire.WireError as exc:
            log.warning("kv.message.refused", error=exc.message)
            connection.abort("not a message")
            return
        match parsed:
            case wire.Pull(pull_id, ticket_id, attempt, incarnation, fingerprint, first_block):
                self._send(
                    tx.PullAsked(
                        peer, pull_id, ticket_id, attempt, incarnation, fingerprint, first_block
                    )
                )
            case wire.Meta():
                self._on_meta(peer, parsed)
            case wire.Ack(pull_id, is_taken):
                self._send(tx.PullAcked(peer, pull_id, is_taken))
            case wire.Refused(pull_id, refusal):
                self._receive(rx.PullRefused(peer, pull_id, f"KV_REFUSED_{refusal.name}"))
            case wire.Renew(ticket_id, attempt, incarnation):
                self._send(tx.LeaseRenewed(ticket_id, attempt, incarnation))

    def _on_meta(self, peer: int, meta: wire.Meta) -> None:
        if self._hooks is not None and self._hooks.is_dropped(meta.pull_id):
            return
        pull = self._pulling.get(meta.pull_id)
        if pull is not None and pull.connection.key == peer:
            pull.ranges, pull.inline = meta.ranges, meta.inline
            pull.landing = pull.landing[: meta.num_bytes]
        is_inline = meta.inline is not None
        self._receive(rx.MetaArrived(peer, meta.pull_id, meta.num_bytes, is_inline))
        if pull is not None:
            pull.inline = None  # a view of the transport's buffer

    # -- the sender's effects ---------------------------------------------------------------------

    def _send(self, event: tx.SenderEvent) -> None:
        for effect in self._tickets.handle(event, time.monotonic()):
            match effect:
                case tx.StartSend(peer, pull_id, ticket_id, first_block):
                    self._start_send(peer, pull_id, self._staged[ticket_id], first_block)
                case tx.Refuse(peer, pull_id, refusal):
                    self._tell(peer, wire.Refused(pull_id, refusal))
                case tx.AbortPeer(peer):
                    self._abort(peer, "a send outlived its lease")
                case tx.CloseTicket(ticket_id, reason):
                    del self._staged[ticket_id]
                    shown = CloseReason.FAILED if self._is_closed else reason
                    self._on_event(TicketClosed(ticket_id, shown.value))
        self._keep_ticking()

    def _start_send(self, peer: int, pull_id: int, staged: _Staged, first_block: int) -> None:
        pieces = [
            staged.data[s.offset : s.offset + s.length] for s in staged.layout.spans(first_block)
        ]
        ranges: list[wire.Range] = []
        num_bytes = 0
        for piece in pieces:
            checksum = staged.checksum if piece.size == staged.data.size else _checksum(piece)
            ranges.append(wire.Range(num_bytes, piece.size, checksum))
            num_bytes += piece.size
        if num_bytes <= wire.MAX_INLINE:
            inline = (
                pieces[0].data if len(pieces) == 1 else memoryview(b"".join(p.data for p in pieces))
            )
            self._tell(peer, wire.Meta(pull_id, num_bytes, tuple(ranges), inline))
            self._send(tx.SendEnded(peer, pull_id))  # the transport has copied it
            return
        self._tell(peer, wire.Meta(pull_id, num_bytes, tuple(ranges)))
        self._send_payloads(peer, pull_id, pieces)

    def _send_payloads(self, peer: int, pull_id: int, pieces: list[ByteArray]) -> None:
        num_left = len(pieces)

        def on_sent() -> None:
            nonlocal num_left
            num_left -= 1
            if num_left == 0:
                self._send(tx.SendEnded(peer, pull_id))

        connection = self._peers[peer]
        for piece in pieces:
            connection.send_payload(pull_id, piece, on_sent)

    def _tell(self, peer: int, message: wire.Message) -> None:
        connection = self._peers.get(peer)
        if connection is not None:
            connection.send(wire.encode(message))

    def _abort(self, peer: int, reason: str) -> None:
        connection = self._peers.get(peer)
        if connection is not None:
            self._pool.remove(
                connection
            )  # the next pull opens another, without waiting for the end
            connection.abort(reason)

    # -- the receiver's effects -------------------------------------------------------------------

    def _receive(self, event: rx.ReceiverEvent) -> None:
        for effect in self._pulls.handle(event, time.monotonic()):
            self._carry_out(effect)
        self._keep_ticking()

    def _carry_out(self, effect: rx.ReceiverEffect) -> None:
        match effect:
            case rx.SendPull(pull_id):
                self._ask(pull_id)
            case rx.ReceivePayload(pull_id):
                self._post_receives(pull_id)
            case rx.Check(pull_id):
                self._check(pull_id)
            case rx.SendAck(pull_id, is_taken):
                self._tell(self._pulling[pull_id].connection.key, wire.Ack(pull_id, is_taken))
            case rx.Complete(pull_id):
                self._complete(self._pulling.pop(pull_id))
            case rx.Fail(pull_id, reason):
                pull = self._pulling[pull_id]
                message = f"pull of ticket {pull.ticket.ticket_id} failed: {reason}"
                if not pull.done.done():
                    pull.done.set_exception(KvTransferFailed(message, reason=reason))
            case rx.FreeLanding(pull_id):
                pull = self._pulling.pop(pull_id)
                self._on_event(LandingFreed(pull.offset))
            case rx.AbortPeer(peer):
                self._abort(peer, "a pull missed its deadline or met nonsense")

    def _complete(self, pull: _Pull) -> None:
        if pull.done.done():  # cancelled, and the news of it has not reached the book
            self._on_event(LandingFreed(pull.offset))
            return
        if self._hooks is not None:
            self._hooks.on_verified(pull.landing)
        pull.done.set_result(pull.landing.size)

    def _ask(self, pull_id: int) -> None:
        pull = self._pulling[pull_id]
        ticket = pull.ticket
        # The fingerprint is ours: the sender compares it with its own.
        message = wire.Pull(
            pull_id,
            ticket.ticket_id,
            ticket.attempt,
            ticket.incarnation,
            self._fingerprint_hash,
            pull.first_block,
        )
        pull.connection.send(wire.encode(message))

    def _post_receives(self, pull_id: int) -> None:
        pull = self._pulling[pull_id]
        pull.num_missing = len(pull.ranges)

        def on_received() -> None:
            pull.num_missing -= 1
            if pull.num_missing == 0:
                self._receive(rx.PayloadArrived(pull_id))

        for r in pull.ranges:
            piece = pull.landing[r.offset : r.offset + r.length]
            pull.connection.recv_payload(pull_id, piece, on_received)

    def _check(self, pull_id: int) -> None:
        pull = self._pulling[pull_id]
        if pull.inline is not None:
            pull.landing[:] = np.frombuffer(pull.inline, np.uint8)
        if self._hooks is not None:
            self._hooks.on_received(pull.landing)
        if pull.landing.size <= _CHECK_ASIDE_BYTES:
            self._receive(rx.Checked(pull_id, _is_intact(pull.landing, pull.ranges)))
            return
        task = self._loop.create_task(self._check_aside(pull_id, pull))
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    async def _check_aside(self, pull_id: int, pull: _Pull) -> None:
        is_intact = await asyncio.to_thread(_is_intact, pull.landing, pull.ranges)
        self._receive(rx.Checked(pull_id, is_intact))

    async def _wait(self, pull_id: int, pull: _Pull) -> int:
        try:
            return await pull.done
        except asyncio.CancelledError:
            if pull.done.cancelled():
                self._receive(rx.CallerLeft(pull_id))
            elif pull.done.exception() is None:
                self._on_event(LandingFreed(pull.offset))  # complete, and nobody there to take it
            raise

    # -- small things -----------------------------------------------------------------------------

    def _address(self, ticket: Ticket) -> str:
        return ticket.addresses[self._identity.rank]

    def _is_busy(self, connection: KvConnection) -> bool:
        return self._pulls.num_pulls_from(connection.key) > 0

    def _keep_ticking(self) -> None:
        has_work = len(self._tickets) or len(self._pulls)
        if has_work and self._tick is None and not self._is_closed:
            self._tick = self._loop.call_later(_TICK_S, self._on_tick)

    def _on_tick(self) -> None:
        self._tick = None
        self._send(tx.Tick())
        self._receive(rx.Tick())


def _checksum(data: ByteArray) -> bytes:
    return xxhash.xxh3_128_digest(data.data)


def _is_intact(data: ByteArray, ranges: tuple[wire.Range, ...]) -> bool:
    return all(_checksum(data[r.offset : r.offset + r.length]) == r.checksum for r in ranges)
