"""The sending half of a KV agent: serves tickets of the staging arena, and blocks of a pool.

A ticket is the right to pull one prompt's staged KV. The core (`core.kv.transfer.sender`) decides
which peer may pull a ticket, and when the last read of the ticket's bytes has ended. The code here
carries out these decisions. It hashes, announces and sends the bytes part by part.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Final

import structlog

from pdmesh import failpoints
from pdmesh.core.instance.arena import ArenaRange
from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.core.kv.transfer import sender as book
from pdmesh.core.kv.transfer import sender_events as tx
from pdmesh.core.kv.transfer.pull_parts import CHUNK_BYTES, MAX_SPANS, pull_parts
from pdmesh.core.kv.transfer.ticket import (
    MAX_TICKET_ID,
    CloseReason,
    Refusal,
    shown_ticket_id,
)
from pdmesh.core.model import Tick
from pdmesh.kv.agent import wire
from pdmesh.kv.agent.arena_memory import AgentMemory
from pdmesh.kv.agent.checksums import (
    HASH_HERE_BYTES,
    ChecksumKind,
    fingerprint_hash,
    group_hash,
)
from pdmesh.kv.agent.connections import Peers
from pdmesh.kv.agent.probes import probe_bytes
from pdmesh.kv.agent.staged import LentBlocks, StagedRange
from pdmesh.kv.agent.types import (
    AgentHooks,
    AgentIdentity,
    AgentTicketClosed,
    PinnedBlocks,
)
from pdmesh.kv.transport.base import KvBytes
from pdmesh.kv.transport.memory_access import flip_bit, host_view
from pdmesh.net.tasks import watched

log = structlog.get_logger(__name__)

MAX_FETCHES = 64  # fetches and probes that are served at the same time
_FETCH_LEASE_S = 10.0

_SLOW_S: Final = 0.5  # the delay of each part, if a failpoint makes the link slow


class SenderHalf:
    def __init__(
        self,
        identity: AgentIdentity,
        memory: AgentMemory,
        peers: Peers,
        on_closed: Callable[[AgentTicketClosed], None],
        hooks: AgentHooks | None,
    ) -> None:
        self._identity = identity
        self._arena, self._blocks = memory.staging, memory.blocks
        self._peers = peers
        self._on_closed = on_closed
        self._hooks = hooks
        self._fingerprint_hash = fingerprint_hash(identity.model_fingerprint)
        self._group_hash = group_hash(identity.group_id)
        self._book = book.TicketBook(identity.incarnation, self._fingerprint_hash, self._group_hash)
        self._staged: dict[str, StagedRange | LentBlocks] = {}
        self._hashing: set[asyncio.Task[None]] = set()
        self._num_fetches = 0
        self._loan_secret = secrets.token_hex(16)
        # Parts that a test or a failpoint delays, by peer, pull id and offset.
        self._late: dict[tuple[int, int, int], asyncio.TimerHandle] = {}
        self._is_closing = False
        self.bytes_sent = 0

    @property
    def num_tickets(self) -> int:
        return len(self._book)

    @property
    def num_sends(self) -> int:
        return self._book.num_sends

    def check_invariants(self) -> None:
        self._book.check_invariants()
        assert len(self._staged) == len(self._book)

    # -- for the engine ---------------------------------------------------------------------------

    def open(
        self,
        ticket_id: str,
        attempt: int,
        r: ArenaRange,
        layout: KvLayout,
        lease_s: float,
        chunk_bytes: int,
        is_tapered: bool,
    ) -> None:
        if not 0 < len(ticket_id.encode()) <= MAX_TICKET_ID:
            raise ValueError(f"a ticket id must have 1 to {MAX_TICKET_ID} bytes")
        if layout.fingerprint and layout.fingerprint != self._identity.model_fingerprint:
            raise ValueError("the layout has another model's fingerprint")
        if layout.total_bytes > r.length:
            raise ValueError(f"{layout} does not fit {r}")
        data = self._arena.view(ArenaRange(r.offset, layout.total_bytes))
        self.handle(
            tx.OpenAsked(ticket_id, attempt, layout, lease_s, chunk_bytes, is_tapered=is_tapered)
        )
        parts = pull_parts(layout, chunk_bytes=chunk_bytes, is_tapered=is_tapered)
        self._staged[ticket_id] = StagedRange(data, layout, parts if layout.total_bytes else ())

    def completes_part(self, ticket_id: str, num_layers: int) -> bool:
        """Whether the first `num_layers` layers complete a part of a pull. Thread-safe.

        Returns True for an unknown ticket, because another thread may be about to open it.
        """
        staged = self._staged.get(ticket_id)
        return not isinstance(staged, StagedRange) or staged.completes_part(num_layers)

    def ready(self, ticket_id: str, num_layers: int) -> None:
        staged = self._staged.get(ticket_id)
        if not isinstance(staged, StagedRange) or num_layers <= staged.num_written:
            return
        staged.num_written = min(num_layers, staged.layout.num_layers)
        if staged.hashing is not None:
            return  # the running task hashes these layers, too
        todo = staged.parts[len(staged.checksums) :][: staged.num_to_hash]
        if sum(part.length for part in todo) > HASH_HERE_BYTES and not staged.has_failed:
            self._start_hashing(ticket_id, staged)
            return
        try:
            for _ in () if staged.has_failed else todo:
                staged.hash_next()
        except Exception as error:  # noqa: BLE001  pulls must not wait forever
            self._hashing_died(ticket_id, staged, error)
            return
        self.handle(tx.LayersReady(ticket_id, staged.num_ready))

    def _start_hashing(self, ticket_id: str, staged: StagedRange) -> None:
        work = self._hash_aside(ticket_id, staged)
        staged.hashing = watched(
            work, "kv-hash", lambda error: self._hashing_died(ticket_id, staged, error)
        )
        self._hashing.add(staged.hashing)
        staged.hashing.add_done_callback(self._hashing.discard)

    async def _hash_aside(self, ticket_id: str, staged: StagedRange) -> None:
        """Hash part by part, so that the first parts are sent while later parts are hashed."""
        while staged.num_to_hash and self._staged.get(ticket_id) is staged:
            await asyncio.to_thread(staged.hash_next)
            if self._staged.get(ticket_id) is staged:
                self.handle(tx.LayersReady(ticket_id, staged.num_ready))
        staged.hashing = None

    def _hashing_died(self, ticket_id: str, staged: StagedRange, error: BaseException) -> None:
        """Refuse all pulls of the ticket.

        The staging range becomes free when the engine has written all layers or releases the
        ticket.
        """
        log.error("kv.hashing.died", ticket=shown_ticket_id(ticket_id), exc_info=error)
        staged.hashing, staged.has_failed = None, True
        if self._staged.get(ticket_id) is staged:
            self.handle(tx.ServingFailed(ticket_id))
            self.handle(tx.LayersReady(ticket_id, staged.num_ready))

    def tick(self) -> None:
        self.handle(Tick())

    async def close(self, within_s: float) -> None:
        """Release all tickets. The caller has closed all connections, so no peer reads now."""
        self._is_closing = True
        for ticket_id in list(self._staged):
            self.handle(tx.Released(ticket_id))
        if self._hashing:
            await asyncio.wait(self._hashing, timeout=within_s)

    # -- peers ------------------------------------------------------------------------------------

    def on_pull(self, peer: int, message: wire.Pull) -> None:
        heads = None
        if message.first_head or message.num_heads:
            heads = (message.first_head, message.num_heads)
        self.handle(
            tx.PullAsked(
                peer,
                message.pull_id,
                message.ticket_id,
                message.attempt,
                message.incarnation,
                message.fingerprint_hash,
                message.first_block,
                heads,
                message.num_takers,
                message.decode,
                message.group_hash,
                wire.question(message),
            )
        )

    def on_fetch(self, peer: int, message: wire.Fetch) -> None:
        """Serve the named blocks, up to the first one that the pool lacks."""
        refusal = self._refusal(message)
        if refusal is not None or self._blocks is None:
            refused = wire.PullRefusal(message.pull_id, refusal or Refusal.UNKNOWN_TICKET)
            self._peers.tell(peer, refused)
            return
        ticket_id = self._name_loan("fetch", peer, message)
        if ticket_id in self._staged:
            return  # this message is a duplicate
        pinned = self._blocks.open(message.names)
        if pinned is None or not pinned.views:
            self._peers.tell(peer, _nothing_of(message))
            return
        self._lend(peer, message, ticket_id, LentBlocks(pinned, self._blocks.close))

    def on_probe(self, peer: int, message: wire.Probe) -> None:
        """Answer with bytes derived from the nonce, and send them like fetched blocks."""
        if (refusal := self._refusal(message)) is not None:
            self._peers.tell(peer, wire.PullRefusal(message.pull_id, refusal))
            return
        ticket_id = self._name_loan("probe", peer, message)
        if ticket_id not in self._staged:
            answer = probe_bytes(message.nonce, message.incarnation, message.fingerprint_hash)
            pinned = LentBlocks(PinnedBlocks([answer]), lambda _: None)
            self._lend(peer, message, ticket_id, pinned)

    def _name_loan(self, kind: str, peer: int, message: wire.Fetch | wire.Probe) -> str:
        """The ticket id for serving this message.

        A duplicate of the message gets the same id. The id never leaves this process, and no peer
        can guess it.
        """
        return f"{kind}/{peer}/{message.pull_id}/{self._loan_secret}"

    def _lend(
        self, peer: int, message: wire.Fetch | wire.Probe, ticket_id: str, pinned: LentBlocks
    ) -> None:
        """Send blocks to a peer under a ticket that only this process knows."""
        views = pinned.blocks.views
        layout = KvLayout(1, len(views), views[0].size)
        chunk_bytes = min(CHUNK_BYTES, MAX_SPANS * layout.block_bytes)  # META has a range per block
        self.handle(tx.OpenAsked(ticket_id, 0, layout, _FETCH_LEASE_S, chunk_bytes, is_single=True))
        self._staged[ticket_id] = pinned
        self._num_fetches += 1
        self.handle(tx.LayersReady(ticket_id, 1))
        ours = (self._identity.incarnation, self._fingerprint_hash)
        asked = tx.PullAsked(peer, message.pull_id, ticket_id, 0, *ours)
        asked.group_hash, asked.question = self._group_hash, wire.question(message)
        self.handle(asked)

    def _refusal(self, message: wire.Fetch | wire.Probe) -> Refusal | None:
        if message.incarnation != self._identity.incarnation:
            return Refusal.WRONG_INCARNATION
        if message.fingerprint_hash != self._fingerprint_hash:
            return Refusal.WRONG_MODEL
        if self._num_fetches >= MAX_FETCHES:
            return Refusal.TOO_MANY_PULLS
        return None

    # -- effects ----------------------------------------------------------------------------------

    def handle(self, event: tx.SenderEvent) -> None:
        """Pass the event to the core and carry out its effects.

        If the transport copies a part at once, the part's `PartSent` is the next event.
        """
        events = [event]
        for event in events:  # the loop appends to `events`
            for effect in self._book.handle(event, time.monotonic()):
                match effect:
                    case tx.SendPart():
                        if self._send_part(effect):
                            events.append(tx.PartSent(effect.peer, effect.pull_id))
                    case tx.RefusePull(peer, pull_id, refusal):
                        self._peers.tell(peer, wire.PullRefusal(pull_id, refusal))
                        events.extend(self._drop_late(peer, pull_id))
                    case tx.AbortPeer(peer):
                        self._peers.abort(peer, "a send outlived its lease")
                    case tx.CloseTicket(ticket_id, reason):
                        self._close_ticket(ticket_id, reason)

    def _send_part(self, effect: tx.SendPart) -> bool:
        """Send a part. Returns whether it is sent already."""
        if delay := self._delay_s(effect):
            timer = asyncio.get_running_loop().call_later(delay, self._send_late, effect)
            self._late[_late_key(effect)] = timer
            return False
        return self._send_now(effect)

    def _delay_s(self, effect: tx.SendPart) -> float:
        """The delay that a test or a failpoint sets for the part, otherwise 0."""
        if self._hooks is not None:
            return self._hooks.part_delay_s(effect.pull_id, effect.part.offset)
        return _SLOW_S if failpoints.hit("prefill.link") == "slow" else 0.0

    def _send_now(self, effect: tx.SendPart) -> bool:
        part = effect.part
        staged = self._staged[effect.ticket_id]
        pieces = staged.pieces(part)
        fault = failpoints.hit("prefill.sending")
        if fault == "corrupt":
            flip_bit(pieces[0][0])  # change a bit after its checksum was made
        ranges: list[wire.Range] = []
        offset = part.offset
        for data, digest in pieces:
            ranges.append(wire.Range(offset, data.size, digest))
            offset += data.size
        self.bytes_sent += part.length
        if part.length <= wire.MAX_INLINE:
            views = [host_view(data) for data, _ in pieces]
            inline = views[0] if len(views) == 1 else memoryview(b"".join(views))
            self._announce(effect, ranges, staged.kind, inline)
            return True  # the transport has copied it
        self._announce(effect, ranges, staged.kind, None)
        if fault == "cut":  # the announced bytes never come
            asyncio.get_running_loop().call_soon(self._peers.abort, effect.peer, "a failpoint")
            return False
        self._send_payloads(effect.peer, effect.pull_id, [data for data, _ in pieces])
        return False

    def _announce(
        self,
        effect: tx.SendPart,
        ranges: list[wire.Range],
        kind: ChecksumKind,
        inline: memoryview | None,
    ) -> None:
        meta = wire.Meta(
            effect.pull_id, effect.num_bytes, tuple(ranges), inline, effect.question, kind
        )
        self._peers.tell(effect.peer, meta)

    def _send_late(self, effect: tx.SendPart) -> None:
        """Send a part that a test or a failpoint has delayed.

        The core has counted the part as being sent, so its ticket is still open.
        """
        del self._late[_late_key(effect)]
        if self._peers.get(effect.peer) is not None and self._send_now(effect):
            self.handle(tx.PartSent(effect.peer, effect.pull_id))

    def _drop_late(self, peer: int, pull_id: int) -> list[tx.PartSent]:
        """Drop a refused pull's delayed parts.

        The peer would abort the connection if one of them arrived.
        """
        keys = [key for key in self._late if key[:2] == (peer, pull_id)]
        for key in keys:
            self._late.pop(key).cancel()
        return [tx.PartSent(peer, pull_id) for _ in keys]

    def _send_payloads(self, peer: int, pull_id: int, pieces: list[KvBytes]) -> None:
        num_left = len(pieces)

        def on_sent() -> None:
            nonlocal num_left
            num_left -= 1
            if num_left == 0:
                self.handle(tx.PartSent(peer, pull_id))

        connection = self._peers.get(peer)
        if connection is not None:  # if None, the transport is about to report the end
            for piece in pieces:
                connection.send_payload(pull_id, piece, on_sent)

    def _close_ticket(self, ticket_id: str, reason: CloseReason) -> None:
        staged = self._staged.pop(ticket_id)
        if isinstance(staged, LentBlocks):
            self._num_fetches -= 1
            staged.unpin(staged.blocks)
            return
        if reason is CloseReason.TAKEN:
            failpoints.hit("prefill.acked")
        shown = CloseReason.FAILED if self._is_closing else reason
        self._on_closed(AgentTicketClosed(ticket_id, shown.value))


def _late_key(effect: tx.SendPart) -> tuple[int, int, int]:
    return effect.peer, effect.pull_id, effect.part.offset


def _nothing_of(message: wire.Fetch) -> wire.Meta:
    return wire.Meta(message.pull_id, 0, (), memoryview(b""), wire.question(message))
