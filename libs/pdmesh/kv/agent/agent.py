"""The KV agent of one rank: stages KV for other agents to pull, and pulls KV from them.

A prefill's agent opens a ticket, which is the right to pull one prompt's KV from its staging arena.
A decode's agent pulls that KV into its landing arena. Both arenas are memory that is registered
with UCX. KV of at most 64 KiB costs three messages: PULL, META with the bytes, and ACK. More KV is
cut into parts of up to a few MiB. Each part costs a META, and a payload if the part exceeds 64 KiB.
`sender.py` sends and `receiver.py` receives. This file has the public methods.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Sequence

import structlog

from pdmesh.core.instance.arena import ArenaRange
from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.core.kv.transfer import sender_events as tx
from pdmesh.core.kv.transfer.pull_parts import CHUNK_BYTES, layer_chunk_bytes
from pdmesh.core.kv.transfer.ticket import PullFailure, Ticket
from pdmesh.errors import KvTransferFailed
from pdmesh.kv.agent.arena_memory import AgentMemory
from pdmesh.kv.agent.checksums import decode_hash, fingerprint_hash, group_hash
from pdmesh.kv.agent.connections import ConnectionPool, Peers
from pdmesh.kv.agent.handler import AgentHandler
from pdmesh.kv.agent.probes import KvProbe
from pdmesh.kv.agent.pull_order import (
    PullOrder,
    bad_ticket,
    check_ticket,
    order_blocks,
    order_ticket,
)
from pdmesh.kv.agent.receiver import ReceiverHalf
from pdmesh.kv.agent.sender import SenderHalf
from pdmesh.kv.agent.ticker import Ticker
from pdmesh.kv.agent.types import (
    AgentEvent,
    AgentHooks,
    AgentIdentity,
    AgentLandingFreed,
    AgentStats,
    OnRange,
    PullResult,
)
from pdmesh.kv.transport.base import ArenaBytes, KvBytes, KvConnection, KvTransport

log = structlog.get_logger(__name__)

_TICK_S = 0.05
_CLOSE_S = 2.0
_MAX_PEERS = 256  # connections that this agent opened


class KvAgent:
    """Call the methods on the event loop that `start` ran on, unless they are thread-safe.

    `on_event` is called on that loop.
    """

    def __init__(
        self,
        transport: KvTransport,
        identity: AgentIdentity,
        memory: AgentMemory,
        on_event: Callable[[AgentEvent], None],
        *,
        hooks: AgentHooks | None = None,
        on_peers: Callable[[int], None] = lambda _: None,  # called with the number of connections
    ) -> None:
        self._transport = transport
        self._identity = identity
        self._on_event = on_event
        self._staging, self._landing = memory.staging, memory.landing
        self._fingerprint_hash = fingerprint_hash(identity.model_fingerprint)
        self._pool = ConnectionPool(transport, _MAX_PEERS, self._peers_in_use)
        self._peers = Peers(self._pool, on_peers)
        self._sender = SenderHalf(identity, memory, self._peers, on_event, hooks)
        self._receiver = ReceiverHalf(self._peers, hooks)
        self._ticker = Ticker(_TICK_S, self._has_work, self._on_tick)
        self._handler = AgentHandler(
            self._peers, self._sender, self._receiver, self._do_posted, self._ticker.keep_going
        )
        self._is_closed = False
        self.address = ""  # the transport's address, once started
        self._posted: deque[Callable[[], None]] = deque()
        self._is_woken = False  # whether a call of `_do_posted` is scheduled

    @property
    def num_tickets(self) -> int:
        return self._sender.num_tickets

    @property
    def num_pulls(self) -> int:
        return self._receiver.num_pulls

    def stats(self) -> AgentStats:
        sender, receiver = self._sender, self._receiver
        return AgentStats(
            num_tickets=sender.num_tickets,
            num_pulls=receiver.num_pulls,
            num_sends=sender.num_sends,
            num_peers=len(self._peers),
            bytes_sent=sender.bytes_sent,
            bytes_received=receiver.bytes_received,
            num_corrupt=receiver.num_corrupt,
            messages_sent=self._peers.messages_sent,
        )

    async def start(self) -> str:
        """Open the transport and return its address. Raises KvTransferFailed."""
        self._loop = asyncio.get_running_loop()
        self.address = await self._transport.start(self._handler)
        return self.address

    # -- sending ----------------------------------------------------------------------------------

    def staging(self, r: ArenaRange) -> ArenaBytes:
        """A view of a range of the staging arena, to gather into."""
        return self._staging.view(r)

    def open(
        self,
        ticket_id: str,
        attempt: int,
        r: ArenaRange,
        layout: KvLayout,
        lease_s: float,
        *,
        chunk_bytes: int | None = None,
    ) -> None:
        """Serve pulls of a prompt whose layers are not computed yet.

        The caller writes layers to the range and reports them with `ready`, until all layers are
        ready or it calls `release`. A pull waits for layers that are not ready. Without
        `chunk_bytes`, the parts get shorter towards the end, so that little is left to move after
        the last layer. Raises ValueError if the ticket is open already, its id is empty or too
        long, the range is too short, or the layout has another model's fingerprint.
        """
        is_tapered = not chunk_bytes
        chunk_bytes = chunk_bytes or layer_chunk_bytes(layout)
        self._sender.open(ticket_id, attempt, r, layout, lease_s, chunk_bytes, is_tapered)

    def completes_part(self, ticket_id: str, num_layers: int) -> bool:
        """Whether the first `num_layers` layers complete a part of a pull. Thread-safe.

        If they do not, the caller need not call `ready` with this number.
        """
        return self._sender.completes_part(ticket_id, num_layers)

    def ready(self, ticket_id: str, num_layers: int) -> None:
        """The first `num_layers` layers are in place. The lease begins when all layers are."""
        self._sender.ready(ticket_id, num_layers)
        self._ticker.keep_going()

    def stage(
        self,
        ticket_id: str,
        attempt: int,
        r: ArenaRange,
        layout: KvLayout,
        lease_s: float,
        *,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Like `open`, for a prompt whose layers are all in place."""
        self.open(ticket_id, attempt, r, layout, lease_s, chunk_bytes=chunk_bytes)
        self.ready(ticket_id, layout.num_layers)

    def release(self, ticket_id: str) -> None:
        """Close a ticket whose range the caller no longer writes.

        AgentTicketClosed follows, at once or when the last send has ended.
        """
        self._sender.handle(tx.Released(ticket_id))

    # -- receiving --------------------------------------------------------------------------------

    def landing(self, r: ArenaRange) -> ArenaBytes:
        """A view of a range of the landing arena, to scatter from."""
        return self._landing.view(r)

    async def connect(self, address: str, deadline_s: float = 5.0) -> KvConnection:
        """The connection to a peer. Opens one if there is none. Raises KvTransferFailed."""
        if self._is_closed:
            raise KvTransferFailed("the KV agent is closing", reason=PullFailure.CLOSING)
        connection = await self._pool.get(address, deadline_s)
        self._peers.add(connection)
        return connection

    async def keep(self, ticket: Ticket, for_s: float) -> None:
        """Renew the lease of a ticket that is not pulled yet.

        The lease is renewed until the ticket is pulled, `stop_renewing` is called or `for_s` has
        passed. This call also opens the connection that the pull will use. Raises KvTransferFailed.
        """
        check_ticket(ticket)
        connection = await self.connect(self._address(ticket, None))
        self._receiver.keep(ticket, connection, for_s)
        self._ticker.keep_going()

    def stop_renewing(self, ticket_id: str) -> None:
        self._receiver.stop_renewing(ticket_id)

    async def pull(
        self,
        ticket: Ticket,
        landing: ArenaRange,
        *,
        deadline_s: float,
        first_block: int = 0,
        on_range: OnRange | None = None,
        source_rank: int | None = None,
        heads: tuple[int, int] | None = None,
        num_takers: int = 1,
        leg: int = 0,
        stall_s: float = math.inf,
        on_silent: Callable[[], None] = lambda: None,
    ) -> PullResult:
        """Pull a ticket's blocks from `first_block` on into `landing`, and verify them.

        The bytes are laid out as in the sender's buffer, without the first `first_block` blocks of
        each layer. `heads` = (first, number) selects some heads, if the layout separates heads.
        `source_rank` is the sender's rank, by default the same number as this agent's rank.
        `num_takers` ranks of this instance pull the ticket from that rank, all for the same `leg`
        (a request's stay on this instance). `on_range` is called with verified bytes while later
        bytes are still on their way.

        Pass `stall_s` if the sender has all bytes. The pull fails if no byte arrives for `stall_s`.
        After a shorter pause, `on_silent` is called, so that the caller can begin other pulls on
        the idle link. After the return, the landing range belongs to the caller. After a failure or
        a cancellation, it belongs to the agent until AgentLandingFreed. Raises KvTransferFailed.
        """
        started, identity = time.monotonic(), self._identity
        try:
            order = order_ticket(
                ticket,
                self._landing.view(landing),
                self._fingerprint_hash,
                first_block=first_block,
                heads=heads,
                num_takers=num_takers,
                decode=decode_hash(identity.instance_id, identity.incarnation, leg),
                group_hash=group_hash(identity.group_id),
                on_range=on_range,
                on_silent=on_silent,
                on_freed=lambda: self.give_back(landing),
            )
            address = self._address(ticket, source_rank)
        except BaseException:
            self.give_back(landing)  # nothing has been requested yet
            raise
        return await self._run(order, address, started, deadline_s, stall_s)

    def expect(self, ticket_id: str, stall_s: float) -> None:
        """Note that the ticket's sender has all bytes.

        From now on, a pull of the ticket fails if no byte arrives for `stall_s`.
        """
        self._receiver.expect(ticket_id, stall_s)

    async def fetch(
        self,
        address: str,
        incarnation: int,
        names: Sequence[bytes],
        targets: Sequence[KvBytes],
        *,
        deadline_s: float,
        on_freed: Callable[[], None],
        source: str = "",
    ) -> Sequence[bytes]:
        """Fetch the blocks of `names`, up to the first one that the peer's pool lacks.

        Block i is written to `targets[i]`. Returns the checksums of the blocks, all verified.
        `on_freed` is called once, when no late write can reach the targets any more: before this
        returns, or some time after a failure. `source` is the peer's instance id. Raises
        KvTransferFailed, or ValueError for bad names or targets.
        """
        started = time.monotonic()
        try:
            order = order_blocks(
                names,
                targets,
                incarnation,
                self._fingerprint_hash,
                source=source,
                on_freed=on_freed,
            )
        except BaseException:
            on_freed()  # nothing has been requested yet
            raise
        result = await self._run(order, address, started, deadline_s)
        on_freed()
        return result.checksums

    async def probe(
        self, address: str, incarnation: int, *, deadline_s: float, source: str = ""
    ) -> float:
        """Verify that KV can travel from a peer to this agent (S16, `probes.py`).

        Returns the duration in seconds. Raises KvTransferFailed. The reason is
        `KV_REFUSED_WRONG_INCARNATION` or `KV_REFUSED_WRONG_MODEL` if another instance answers.
        """
        probe = KvProbe(incarnation, self._fingerprint_hash, source)
        result = await self._run(probe.order, address, time.monotonic(), deadline_s)
        probe.check()
        return result.duration_s

    def disconnect(self, address: str) -> None:
        """Drop the connection to a peer that has left, as soon as no pull uses it (S26)."""
        self._pool.leave(address)
        self._ticker.keep_going()

    async def _run(
        self,
        order: PullOrder,
        address: str,
        started: float,
        deadline_s: float,
        stall_s: float = math.inf,
    ) -> PullResult:
        try:
            self._receiver.check_room()
            connection = self._pool.find(address)
            if connection is None:
                connection = await self._receiver.opening(
                    order, lambda: self.connect(address, deadline_s), stall_s
                )
            # The task that opened the connection may not have resumed and added it yet.
            self._peers.add(connection)
        except BaseException:
            order.on_freed()  # nothing has been requested yet
            raise
        self._ticker.keep_going(soon=True)
        deadline = started + deadline_s
        return await self._receiver.pull(order, connection, started, deadline, stall_s)

    def give_back(self, landing: ArenaRange) -> None:
        """Report AgentLandingFreed for a pull that never began, failed or was cancelled."""
        self._on_event(AgentLandingFreed(landing.offset))

    # -- both -------------------------------------------------------------------------------------

    def post(self, what: Callable[[], None]) -> None:
        """Call `what` on the loop, before any message that arrives from now on. Thread-safe.

        Several calls before the loop runs again wake the loop only once.
        """
        self._posted.append(what)
        if self._is_woken:  # `_do_posted` clears the flag before it reads, so it finds `what`
            return
        self._is_woken = True
        with contextlib.suppress(RuntimeError):  # the loop is closed, and so are all tickets
            self._loop.call_soon_threadsafe(self._do_posted)

    def _do_posted(self) -> None:
        self._is_woken = False
        while self._posted:
            what = self._posted.popleft()
            try:
                what()
            except Exception as error:  # the calls that other callers posted must still be made
                log.error("kv.posted.died", exc_info=error)

    async def close(self) -> None:
        """Drop all connections, close all tickets, fail all pulls. Idempotent, in bounded time."""
        if self._is_closed:
            return
        self._is_closed = True
        self._ticker.stop()
        await self._pool.close()
        await self._transport.close()
        await self._receiver.close(_CLOSE_S)
        await self._sender.close(_CLOSE_S)
        self._staging.close()
        self._landing.close()

    def check_invariants(self) -> None:
        self._sender.check_invariants()
        self._receiver.check_invariants()

    # -- small things -----------------------------------------------------------------------------

    def _address(self, ticket: Ticket, source_rank: int | None) -> str:
        rank = self._identity.rank if source_rank is None else source_rank
        if not 0 <= rank < len(ticket.addresses):
            raise bad_ticket(f"addresses: none of rank {rank}")
        return ticket.addresses[rank]

    def _peers_in_use(self) -> set[int]:
        return self._receiver.peers_in_use()

    def _has_work(self) -> bool:
        """Whether ticks are needed: for a pull, a ticket, or a connection that is to be dropped."""
        return bool(self._sender.num_tickets or self._receiver.has_work or self._pool.is_leaving)

    def _on_tick(self) -> None:
        self._sender.tick()
        self._receiver.tick()
        self._pool.drop_left()
