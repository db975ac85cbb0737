"""Decides which peer may pull which bytes of a ticket, and when their memory may be reused.

A ticket is the right to pull one prompt's KV from a range of the sender's memory. First the engine
writes layers into this range. The writing ends only when the engine reports the last layer or
releases the ticket. Then the ticket's lease begins.

A ticket is closed once: taken, released, expired or failed. `CloseTicket` never comes while the
engine writes the bytes or a send reads them. A slow peer extends the lease, within a bound, by
taking bytes and by renewing. A frozen peer does neither.

If a send outlives the lease, its connection may have to be aborted, because only the end of the
connection proves that nothing reads the bytes any more. But all pulls of a peer share one
connection, and a peer that takes or renews any ticket is not frozen. So the connection is aborted
only when the peer has been silent for the length of a lease, or when the last possible lease of the
ticket has ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdmesh.core.deadlines import MAX_LEASES
from pdmesh.core.flight_recorder import FlightRecorder, recorded
from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.core.kv.transfer.pull_parts import (
    JOINED_BYTES,
    MAX_SPANS,
    KvPart,
    joined,
    pull_parts,
)
from pdmesh.core.kv.transfer.sender_events import (
    AbortPeer,
    CloseTicket,
    LayersReady,
    LeaseRenewed,
    OpenAsked,
    PartSent,
    PeerLost,
    PullAcked,
    PullAsked,
    RefusePull,
    Released,
    SenderEffect,
    SenderEvent,
    SendPart,
    ServingFailed,
)
from pdmesh.core.kv.transfer.ticket import CloseReason, Refusal
from pdmesh.core.model import Tick

MAX_PULLS_PER_TICKET = 16
MAX_DECODES = 16  # a ticket remembers which peers took all bytes for at most so many decodes
# How many parts of one pull are sent at once. With two, the next part follows without a pause, and
# other pulls get their turn.
WINDOW = 2

_Key = tuple[int, int]  # peer, pull


@dataclass(slots=True)
class _Pull:
    """One reader of a ticket's range. The first `num_announced` of its parts were announced.

    `num_in_flight` sends are reading the range now. A send has one part, or several joined ones.
    """

    parts: tuple[KvPart, ...]
    num_bytes: int
    num_takers: int
    decode: int
    question: int
    num_announced: int = 0
    num_in_flight: int = 0
    is_stopped: bool = False  # no more parts are announced

    @property
    def is_announced(self) -> bool:
        return self.num_announced == len(self.parts)


@dataclass(slots=True)
class _Ticket:
    attempt: int
    layout: KvLayout
    lease_s: float
    chunk_bytes: int
    is_single: bool
    is_tapered: bool = False
    num_ready: int = 0  # layers
    has_writer: bool = True  # the engine may write, until the last layer or the release
    lease_ends: float = math.inf  # infinite while there is a writer
    last_lease_ends: float = math.inf
    takers: dict[int, set[int]] = field(default_factory=dict)  # peers that took all, by decode
    pulls: dict[_Key, _Pull] = field(default_factory=dict)
    closing: CloseReason | None = None

    @property
    def is_read(self) -> bool:
        return any(pull.num_in_flight for pull in self.pulls.values())

    def begin_lease(self, now: float) -> None:
        """Begin the lease, because the engine writes no more."""
        self.has_writer = False
        self.lease_ends = now + self.lease_s
        self.last_lease_ends = now + MAX_LEASES * self.lease_s

    def renew(self, now: float) -> None:
        ends = now + self.lease_s
        if ends > self.lease_ends:
            self.lease_ends = min(ends, self.last_lease_ends)


class TicketBook:
    """One agent's tickets. Only `handle` changes the book."""

    def __init__(self, incarnation: int, fingerprint_hash: int, group_hash: int = 0) -> None:
        self.recorder = FlightRecorder()
        self._incarnation = incarnation
        self._fingerprint_hash = fingerprint_hash
        self._group_hash = group_hash
        self._tickets: dict[str, _Ticket] = {}
        self._tickets_by_pull: dict[_Key, str] = {}
        self._heard_at: dict[int, float] = {}  # by peer: when it asked, took or renewed last

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def num_sends(self) -> int:
        """The number of pulls that are being served."""
        return len(self._tickets_by_pull)

    @recorded
    def handle(self, event: SenderEvent, now: float) -> list[SenderEffect]:
        """Raises ValueError, without a change, for OpenAsked with the id of an open ticket."""
        match event:
            case PullAsked():
                return self._on_pull(event, now)
            case PartSent(peer, pull_id):
                return self._on_sent((peer, pull_id), now)
            case PullAcked():
                return self._on_acked(event)
            case OpenAsked():
                return self._on_opened(event)
            case LayersReady(ticket_id, num_layers):
                return self._on_ready(ticket_id, num_layers, now)
            case Released() | ServingFailed():
                return self._on_ended(event, now)
            case LeaseRenewed():
                return self._on_renewed(event, now)
            case PeerLost(peer):
                return self._on_peer_lost(peer)
            case Tick():
                return self._on_tick(now)

    def check_invariants(self) -> None:
        for ticket_id, ticket in self._tickets.items():
            assert len(ticket.pulls) <= MAX_PULLS_PER_TICKET
            assert len(ticket.takers) <= MAX_DECODES
            assert ticket.closing is None or ticket.is_read or ticket.has_writer, "closed late"
            for key, pull in ticket.pulls.items():
                assert self._tickets_by_pull[key] == ticket_id
                assert 0 <= pull.num_in_flight <= min(WINDOW, pull.num_announced)
                assert not pull.is_stopped or pull.num_in_flight, "it should have ended"
                for part in pull.parts[: pull.num_announced]:
                    assert part.end_layer <= ticket.num_ready, "sent before it was written"
        assert len(self._tickets_by_pull) == sum(len(t.pulls) for t in self._tickets.values())

    # -- a ticket's bytes -------------------------------------------------------------------------

    def _on_opened(self, event: OpenAsked) -> list[SenderEffect]:
        if event.ticket_id in self._tickets:
            raise ValueError("a ticket with this id is open already")
        self._tickets[event.ticket_id] = _Ticket(
            event.attempt,
            event.layout,
            event.lease_s,
            event.chunk_bytes,
            event.is_single,
            event.is_tapered,
        )
        return []

    def _on_ready(self, ticket_id: str, num_layers: int, now: float) -> list[SenderEffect]:
        ticket = self._tickets.get(ticket_id)
        if ticket is None or num_layers <= ticket.num_ready:
            return []
        ticket.num_ready = min(num_layers, ticket.layout.num_layers)
        if ticket.num_ready == ticket.layout.num_layers:
            ticket.begin_lease(now)
        sends = [part for key in ticket.pulls for part in self._serve(ticket_id, ticket, key)]
        return sends + self._finish_closing(ticket_id)

    def _on_ended(self, event: Released | ServingFailed, now: float) -> list[SenderEffect]:
        if isinstance(event, ServingFailed):
            return self._close(event.ticket_id, CloseReason.FAILED)
        ticket = self._tickets.get(event.ticket_id)
        if ticket is not None and ticket.has_writer:
            ticket.begin_lease(now)  # so that the lease bounds sends that are still running
        return self._close(event.ticket_id, CloseReason.RELEASED)

    # -- a pull -----------------------------------------------------------------------------------

    def _on_pull(self, event: PullAsked, now: float) -> list[SenderEffect]:
        key = (event.peer, event.pull_id)
        if key in self._tickets_by_pull:
            return []  # the message was repeated, and the pull is being served
        self._heard_at[event.peer] = now
        ticket = self._tickets.get(event.ticket_id)
        refusal = self._refusal(event, ticket, now)
        if refusal is not None or ticket is None:
            return [RefusePull(event.peer, event.pull_id, refusal or Refusal.UNKNOWN_TICKET)]
        try:
            parts = pull_parts(
                ticket.layout, event.first_block, event.heads, ticket.chunk_bytes, ticket.is_tapered
            )
        except IndexError:
            return [RefusePull(event.peer, event.pull_id, Refusal.BAD_RANGE)]
        ticket.pulls[key] = _Pull(
            parts,
            parts[-1].offset + parts[-1].length,
            event.num_takers,
            event.decode,
            event.question,
        )
        ticket.renew(now)
        self._tickets_by_pull[key] = event.ticket_id
        return self._serve(event.ticket_id, ticket, key)

    def _refusal(self, event: PullAsked, ticket: _Ticket | None, now: float) -> Refusal | None:
        if event.incarnation != self._incarnation:
            return Refusal.WRONG_INCARNATION
        if event.fingerprint_hash != self._fingerprint_hash:
            return Refusal.WRONG_MODEL
        if event.group_hash != self._group_hash:
            return Refusal.WRONG_GROUP
        if ticket is None:
            return Refusal.UNKNOWN_TICKET
        if event.attempt != ticket.attempt:
            return Refusal.WRONG_ATTEMPT
        if ticket.closing is not None:
            return Refusal.TICKET_CLOSED
        if now >= ticket.lease_ends:
            return Refusal.LEASE_ENDED
        if len(ticket.pulls) >= MAX_PULLS_PER_TICKET:
            return Refusal.TOO_MANY_PULLS
        return None

    def _serve(self, ticket_id: str, ticket: _Ticket, key: _Key) -> list[SenderEffect]:
        """Announce the parts whose layers are ready, as far as the window allows."""
        pull = ticket.pulls[key]
        effects: list[SenderEffect] = []
        while not (pull.is_stopped or pull.is_announced) and pull.num_in_flight < WINDOW:
            next_parts = _next_parts(pull, ticket)
            if not next_parts:
                break
            part = next_parts[0] if len(next_parts) == 1 else joined(next_parts)
            pull.num_announced += len(next_parts)
            pull.num_in_flight += 1
            effects.append(SendPart(*key, ticket_id, part, pull.num_bytes, pull.question))
        return effects

    def _on_sent(self, key: _Key, now: float) -> list[SenderEffect]:
        ticket_id = self._tickets_by_pull.get(key)
        if ticket_id is None:
            return []
        ticket = self._tickets[ticket_id]
        pull = ticket.pulls[key]
        pull.num_in_flight -= 1
        self._heard_at[key[0]] = now
        ticket.renew(now)
        if pull.is_stopped:
            return self._drop_stopped(ticket_id, key)
        if ticket.closing is not None:
            return self._finish_closing(ticket_id)
        return self._serve(ticket_id, ticket, key)

    def _on_acked(self, event: PullAcked) -> list[SenderEffect]:
        key = (event.peer, event.pull_id)
        ticket_id = self._tickets_by_pull.get(key)
        if ticket_id is None:
            return []
        ticket = self._tickets[ticket_id]
        pull = ticket.pulls[key]
        if not event.is_taken or not pull.is_announced:
            return self._stop(ticket_id, key, Refusal.STOPPED)
        # Takers are counted by decode: if a decode fails after some of its ranks took the KV, the
        # next decode needs all of the KV.
        takers = ticket.takers.setdefault(pull.decode, set())
        takers.add(event.peer)
        if len(takers) >= pull.num_takers:
            return self._close(ticket_id, CloseReason.TAKEN)
        if len(ticket.takers) > MAX_DECODES:
            del ticket.takers[next(iter(ticket.takers))]
        pull.is_stopped = True
        return self._drop_stopped(ticket_id, key)

    def _stop(self, ticket_id: str, key: _Key, refusal: Refusal) -> list[SenderEffect]:
        """Announce no more parts of this pull. Tell the peer, unless all were announced."""
        pull = self._tickets[ticket_id].pulls[key]
        if pull.is_stopped:
            return []
        pull.is_stopped = True
        said: list[SenderEffect] = [] if pull.is_announced else [RefusePull(*key, refusal)]
        return said + self._drop_stopped(ticket_id, key)

    def _drop_stopped(self, ticket_id: str, key: _Key) -> list[SenderEffect]:
        ticket = self._tickets[ticket_id]
        if not ticket.pulls[key].num_in_flight:
            self._forget(key)
            if ticket.is_single:
                return self._close(ticket_id, CloseReason.RELEASED)
        return self._finish_closing(ticket_id)

    # -- the end of a ticket ----------------------------------------------------------------------

    def _on_renewed(self, event: LeaseRenewed, now: float) -> list[SenderEffect]:
        self._heard_at[event.peer] = now
        ticket = self._tickets.get(event.ticket_id)
        is_ours = event.incarnation == self._incarnation
        if ticket and is_ours and event.attempt == ticket.attempt and now < ticket.lease_ends:
            ticket.renew(now)
        return []

    def _on_peer_lost(self, peer: int) -> list[SenderEffect]:
        self._heard_at.pop(peer, None)
        lost = [key for key in self._tickets_by_pull if key[0] == peer]
        touched = dict.fromkeys(self._tickets_by_pull[key] for key in lost)
        for key in lost:
            self._forget(key)
        effects: list[SenderEffect] = []
        for ticket_id in touched:
            if self._tickets[ticket_id].is_single:
                effects += self._close(ticket_id, CloseReason.RELEASED)
            else:
                effects += self._finish_closing(ticket_id)
        return effects

    def _on_tick(self, now: float) -> list[SenderEffect]:
        ended = [t for t, ticket in self._tickets.items() if now >= ticket.lease_ends]
        effects: list[SenderEffect] = []
        for ticket_id in ended:
            effects += self._close(ticket_id, CloseReason.EXPIRED)
            if (ticket := self._tickets.get(ticket_id)) is not None:
                # A send still reads the bytes, and only the end of its connection can stop it.
                readers = {key[0]: None for key, p in ticket.pulls.items() if p.num_in_flight}
                effects += [AbortPeer(p) for p in readers if not self._is_alive(p, ticket, now)]
        return effects

    def _is_alive(self, peer: int, ticket: _Ticket, now: float) -> bool:
        """Whether the peer was heard within a lease, and a lease of the ticket is still possible.

        Then its sends may still end.
        """
        return now < min(self._heard_at[peer] + ticket.lease_s, ticket.last_lease_ends)

    def _close(self, ticket_id: str, reason: CloseReason) -> list[SenderEffect]:
        ticket = self._tickets.get(ticket_id)
        if ticket is None:
            return []
        effects: list[SenderEffect] = []
        if ticket.closing is None:
            ticket.closing = reason
            why = Refusal.LEASE_ENDED if reason is CloseReason.EXPIRED else Refusal.TICKET_CLOSED
            for key, pull in list(ticket.pulls.items()):
                if not (pull.is_stopped or pull.is_announced):
                    effects.append(RefusePull(*key, why))
                pull.is_stopped = True
                if not pull.num_in_flight:
                    self._forget(key)
        return effects + self._finish_closing(ticket_id)

    def _finish_closing(self, ticket_id: str) -> list[SenderEffect]:
        ticket = self._tickets.get(ticket_id)
        if ticket is None or ticket.closing is None or ticket.is_read or ticket.has_writer:
            return []
        for key in list(ticket.pulls):
            self._forget(key)
        del self._tickets[ticket_id]
        return [CloseTicket(ticket_id, ticket.closing)]

    def _forget(self, key: _Key) -> None:
        del self._tickets[self._tickets_by_pull.pop(key)].pulls[key]


def _next_parts(pull: _Pull, ticket: _Ticket) -> Sequence[KvPart]:
    """The parts to announce next as one: the first, and short parts after it that are ready too."""
    most = min(ticket.chunk_bytes, JOINED_BYTES)
    first = end = pull.num_announced
    num_bytes = num_spans = 0
    while end < len(pull.parts) and pull.parts[end].end_layer <= ticket.num_ready:
        num_bytes += pull.parts[end].length
        num_spans += len(pull.parts[end].spans)
        if end > first and (num_bytes > most or num_spans > MAX_SPANS):
            break
        end += 1
    return pull.parts[first:end]
