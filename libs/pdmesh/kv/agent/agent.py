"""The transfer agent of one rank: stages KV for others to pull, and pulls from others.

It runs on one event loop. One connection per peer carries all pulls at once, told apart by pull id.
A prompt of at most 64 KiB costs three messages: PULL, META with the bytes, and ACK. A longer prompt
adds one META per further part of up to a few MiB, and one payload for each part beyond 64 KiB.
`sender.py` sends and `receiver.py` receives. This file has the public methods and what the two
halves share.
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
    """Call all methods on the loop of `start`; `on_event` is called on it, too."""

    def __init__(
        self,
        transport: KvTransport,
        identity: AgentIdentity,
        memory: AgentMemory,
        on_event: Callable[[AgentEvent], None],
        *,
        hooks: AgentHooks | None = None,
        on_peers: Callable[[int], None] = lambda _: None,  # how many connections are open
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
        self._is_woken = False  # a call of `_do_posted` is on its way

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
        """Open the transport; returns its address. Raises KvTransferFailed."""
        self._loop = asyncio.get_running_loop()
        self.address = await self._transport.start(self._handler)
        return self.address

    # -- sending ----------------------------------------------------------------------------------

    def staging(self, r: ArenaRange) -> ArenaBytes:
        """A view of the staging arena, to gather into."""
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
        """Serve pulls of a prompt whose layers are still to come.

        Each pull waits until its bytes are `ready`. Without `chunk_bytes` the prompt is cut so that
        little is left to move after the last layer. The caller writes the range until all layers
        are ready. It must end its writing with the last layer or with `release`. Raises ValueError
        if the ticket is open already, the range is too short or the layout is not ours.
        """
        is_tapered = not chunk_bytes
        chunk_bytes = chunk_bytes or layer_chunk_bytes(layout)
        self._sender.open(ticket_id, attempt, r, layout, lease_s, chunk_bytes, is_tapered)

    def completes_part(self, ticket_id: str, num_layers: int) -> bool:
        """Thread-safe: whether a pull of all heads and blocks can go on once these layers are
        ready.

        If not, `ready` need not be called yet: other pulls can wait, too.
        """
        return self._sender.completes_part(ticket_id, num_layers)

    def ready(self, ticket_id: str, num_layers: int) -> None:
        """The layers below `num_layers` are in place. After the last one the lease begins."""
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
        """`open` with all layers in place."""
        self.open(ticket_id, attempt, r, layout, lease_s, chunk_bytes=chunk_bytes)
        self.ready(ticket_id, layout.num_layers)

    def release(self, ticket_id: str) -> None:
        """No peer should pull the ticket any more, and nothing writes its range now.

        TicketClosed follows, at once or when the last send has ended.
        """
        self._sender.handle(tx.Released(ticket_id))

    # -- receiving --------------------------------------------------------------------------------

    def landing(self, r: ArenaRange) -> ArenaBytes:
        """A view of the landing arena, to scatter from."""
        return self._landing.view(r)

    async def connect(self, address: str, deadline_s: float = 5.0) -> KvConnection:
        """Our connection to a peer, opened if there is none. Raises KvTransferFailed."""
        if self._is_closed:
            raise KvTransferFailed("the KV agent is closing", reason=PullFailure.CLOSING)
        connection = await self._pool.get(address, deadline_s)
        self._peers.add(connection)
        return connection

    async def keep(self, ticket: Ticket, for_s: float) -> None:
        """Renew a ticket's lease while it waits here for its turn.

        The lease is renewed until the ticket is pulled, `stop_renewing` is called or `for_s` has
        passed. The connection is opened, too, so that the pull finds it. Raises KvTransferFailed.
        """
        check_ticket(ticket)
        connection = await self.connect(self._address(ticket, None))
        self._receiver.keep(ticket, connection, for_s)
        self._ticker.keep_going()

    def stop_renewing(self, ticket_id: str) -> None:
        """Stop renewing a ticket's lease."""
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
        each layer. `heads` = (first, number) selects some heads, if the layout tells heads apart.
        `source_rank`: the sender's rank; None: the same rank as ours. `num_takers` ranks of this
        instance pull the ticket from the sender's rank for the same `leg`.
        `on_range` gets verified bytes while others are still on their way.

        A sender that has all bytes may be silent for `stall_s`. `on_silent` is called when it has
        been silent for a while, so that the link is free for other pulls. After the return the
        landing range is the caller's. Raises KvTransferFailed. After a failure or a cancellation,
        the range stays the agent's until AgentLandingFreed.
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
        """The ticket's sender has all bytes: pulls now fail after `stall_s` without bytes."""
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
        """Fetch the blocks of `names` that a peer's pool holds without a gap from the first on.

        Returns their checksums, all verified. Block i goes to `targets[i]`. `on_freed` is called
        once, when no late write can reach the targets: before the return, or after the failure.
        `source` is the peer's instance id. Raises KvTransferFailed.
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
        """Verify the connection to a peer: a nonce comes back the way KV would (S16).

        Returns how many seconds it took. Raises KvTransferFailed; its reason is
        `KV_REFUSED_WRONG_INCARNATION` or `KV_REFUSED_WRONG_MODEL` if another instance answers.
        """
        probe = KvProbe(incarnation, self._fingerprint_hash, source)
        result = await self._run(probe.order, address, time.monotonic(), deadline_s)
        probe.check()
        return result.duration_s

    def disconnect(self, address: str) -> None:
        """The peer has left: drop our connection to it as soon as no pull uses it (S26)."""
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
            self._peers.add(connection)  # its opener may not have run again yet
        except BaseException:
            order.on_freed()  # nothing has been requested yet
            raise
        self._ticker.keep_going(soon=True)
        deadline = started + deadline_s
        return await self._receiver.pull(order, connection, started, deadline, stall_s)

    def give_back(self, landing: ArenaRange) -> None:
        """AgentLandingFreed for a pull that never began, or whose result was not taken."""
        self._on_event(AgentLandingFreed(landing.offset))

    # -- both -------------------------------------------------------------------------------------

    def post(self, what: Callable[[], None]) -> None:
        """Thread-safe: call `what` on the loop, before any message that arrives from now on.

        Several calls before the loop runs again wake it once.
        """
        self._posted.append(what)
        if self._is_woken:  # `_do_posted` clears this first, so it still finds `what`
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
            except Exception as error:  # other callers' calls wait behind this one
                log.error("kv.posted.died", exc_info=error)

    async def close(self) -> None:
        """Drop all connections, close all tickets, fail all pulls. Bounded in time, idempotent."""
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
        """Whether a pull or a ticket depends on time, so that ticks are needed."""
        return bool(self._sender.num_tickets or self._receiver.has_work or self._pool.is_leaving)

    def _on_tick(self) -> None:
        self._sender.tick()
        self._receiver.tick()
        self._pool.drop_left()
