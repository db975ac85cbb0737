"""The sender's tickets: who may pull which staged bytes, and when those bytes may be reused.

A ticket is STAGED from its first byte to its last reader: taken, released or expired, it is closed once, and
never while a send reads its bytes. A send that outlives the lease has its connection aborted; the
end of the connection is the proof that nothing reads any more. A peer that is merely slow keeps the lease
alive by pulling; one that is frozen does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from pdmesh.core.ticket import CloseReason, Refusal

MAX_PULLS_PER_TICKET = 8


@dataclass(frozen=True, slots=True)
class Staged:
    """The bytes of a ticket are in place."""

    ticket_id: str
    attempt: int
    num_blocks: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class PullAsked:
    """A peer wants a ticket's blocks from `first_block` on. `peer` is the connection."""

    peer: int
    pull_id: int
    ticket_id: str
    attempt: int
    incarnation: int
    fingerprint_hash: int
    first_block: int


@dataclass(frozen=True, slots=True)
class SendEnded:
    """The last byte of a pull left the ticket's range; nothing reads it for this pull any more."""

    peer: int
    pull_id: int


@dataclass(frozen=True, slots=True)
class PullAcked:
    """The receiver is done: `is_taken` if it verified the bytes and goes on from them."""

    peer: int
    pull_id: int
    is_taken: bool


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """A receiver that has not pulled yet asks to keep the bytes."""

    ticket_id: str
    attempt: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Released:
    """Nobody will pull this ticket."""

    ticket_id: str


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A connection is gone, and with it every send on it."""

    peer: int


@dataclass(frozen=True, slots=True)
class Tick:
    pass


SenderEvent = Staged | PullAsked | SendEnded | PullAcked | LeaseRenewed | Released | PeerLost | Tick


@dataclass(frozen=True, slots=True)
class StartSend:
    peer: int
    pull_id: int
    ticket_id: str
    first_block: int


@dataclass(frozen=True, slots=True)
class Refuse:
    peer: int
    pull_id: int
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class AbortPeer:
    """Drop the connection; answered by PeerLost. May be repeated."""

    peer: int


@dataclass(frozen=True, slots=True)
class CloseTicket:
    """The ticket's bytes are free. The last word about it."""

    ticket_id: str
    reason: CloseReason


SenderEffect = StartSend | Refuse | AbortPeer | CloseTicket


class _Read(Enum):
    """What one pull still does to the ticket's bytes."""

    SENDING = auto()
    SENDING_IN_VAIN = auto()  # the receiver gave up, the send has not ended
    SENT = auto()  # the ack is yet to come


@dataclass(slots=True)
class _Open:
    attempt: int
    num_blocks: int
    lease_s: float
    lease_ends: float
    pulls: dict[tuple[int, int], _Read] = field(default_factory=dict)  # by (peer, pull)
    closing: CloseReason | None = None

    @property
    def is_read(self) -> bool:
        return any(read is not _Read.SENT for read in self.pulls.values())

    @property
    def readers(self) -> list[int]:
        """Peers with a send in flight."""
        peers = (key[0] for key, read in self.pulls.items() if read is not _Read.SENT)
        return list(dict.fromkeys(peers))


class TicketBook:
    """One agent's tickets. `handle` is the only way to change it."""

    def __init__(self, incarnation: int, fingerprint_hash: int) -> None:
        self._incarnation = incarnation
        self._fingerprint_hash = fingerprint_hash
        self._open: dict[str, _Open] = {}
        self._tickets_by_pull: dict[tuple[int, int], str] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_sends(self) -> int:
        reads = (read for ticket in self._open.values() for read in ticket.pulls.values())
        return sum(read is not _Read.SENT for read in reads)

    def handle(self, event: SenderEvent, now: float) -> list[SenderEffect]:
        """Raises ValueError for a ticket id that is open already, leaving the book as it was."""
        match event:
            case PullAsked():
                return self._on_pull(event, now)
            case SendEnded():
                return self._on_send_ended(event)
            case PullAcked():
                return self._on_acked(event)
            case Staged():
                return self._on_staged(event, now)
            case Released(ticket_id):
                return self._close(ticket_id, CloseReason.RELEASED)
            case LeaseRenewed():
                return self._on_renewed(event, now)
            case PeerLost(peer):
                return self._on_peer_lost(peer)
            case Tick():
                return self._on_tick(now)

    def check_invariants(self) -> None:
        for ticket_id, ticket in self._open.items():
            assert len(ticket.pulls) <= MAX_PULLS_PER_TICKET
            assert ticket.closing is None or ticket.is_read, "closed late"
            for key in ticket.pulls:
                assert self._tickets_by_pull[key] == ticket_id
        assert len(self._tickets_by_pull) == sum(len(t.pulls) for t in self._open.values())

    def _on_staged(self, event: Staged, now: float) -> list[SenderEffect]:
        if event.ticket_id in self._open:
            raise ValueError(f"ticket {event.ticket_id} is open already")
        self._open[event.ticket_id] = _Open(
            event.attempt, event.num_blocks, event.lease_s, now + event.lease_s
        )
        return []

    def _on_pull(self, event: PullAsked, now: float) -> list[SenderEffect]:
        key = (event.peer, event.pull_id)
        if key in self._tickets_by_pull:
            return []  # the same message again: it is being served
        refusal = self._refusal(event, now)
        if refusal is not None:
            return [Refuse(event.peer, event.pull_id, refusal)]
        ticket = self._open[event.ticket_id]
        ticket.pulls[key] = _Read.SENDING
        ticket.lease_ends = max(ticket.lease_ends, now + ticket.lease_s)
        self._tickets_by_pull[key] = event.ticket_id
        return [StartSend(event.peer, event.pull_id, event.ticket_id, event.first_block)]

    def _refusal(self, event: PullAsked, now: float) -> Refusal | None:
        if event.incarnation != self._incarnation:
            return Refusal.WRONG_INCARNATION
        if event.fingerprint_hash != self._fingerprint_hash:
            return Refusal.WRONG_MODEL
        ticket = self._open.get(event.ticket_id)
        if ticket is None:
            return Refusal.UNKNOWN_TICKET
        checks = (
            (event.attempt != ticket.attempt, Refusal.WRONG_ATTEMPT),
            (ticket.closing is not None, Refusal.TICKET_CLOSED),
            (now >= ticket.lease_ends, Refusal.LEASE_ENDED),
            (event.first_block > ticket.num_blocks, Refusal.BAD_RANGE),
            (len(ticket.pulls) >= MAX_PULLS_PER_TICKET, Refusal.TOO_MANY_PULLS),
        )
        return next((refusal for is_so, refusal in checks if is_so), None)

    def _on_send_ended(self, event: SendEnded) -> list[SenderEffect]:
        key = (event.peer, event.pull_id)
        ticket_id = self._tickets_by_pull.get(key)
        if ticket_id is None:
            return []
        ticket = self._open[ticket_id]
        if ticket.pulls[key] is _Read.SENDING_IN_VAIN:
            self._forget(key)
        else:
            ticket.pulls[key] = _Read.SENT
        return self._finish_closing(ticket_id)

    def _on_acked(self, event: PullAcked) -> list[SenderEffect]:
        key = (event.peer, event.pull_id)
        ticket_id = self._tickets_by_pull.get(key)
        if ticket_id is None:
            return []
        if event.is_taken:
            return self._close(ticket_id, CloseReason.TAKEN)
        if self._open[ticket_id].pulls[key] is _Read.SENT:
            self._forget(key)
        else:
            self._open[ticket_id].pulls[key] = _Read.SENDING_IN_VAIN
        return []

    def _on_renewed(self, event: LeaseRenewed, now: float) -> list[SenderEffect]:
        ticket = self._open.get(event.ticket_id)
        is_ours = event.incarnation == self._incarnation
        if ticket and is_ours and event.attempt == ticket.attempt and now < ticket.lease_ends:
            ticket.lease_ends = max(ticket.lease_ends, now + ticket.lease_s)
        return []

    def _on_peer_lost(self, peer: int) -> list[SenderEffect]:
        lost = [key for key in self._tickets_by_pull if key[0] == peer]
        touched = dict.fromkeys(self._tickets_by_pull[key] for key in lost)
        for key in lost:
            self._forget(key)
        return [effect for ticket_id in touched for effect in self._finish_closing(ticket_id)]

    def _on_tick(self, now: float) -> list[SenderEffect]:
        ended = [t for t, ticket in self._open.items() if now >= ticket.lease_ends]
        effects: list[SenderEffect] = []
        for ticket_id in ended:
            effects += self._close(ticket_id, CloseReason.EXPIRED)
            if (
                ticket_id in self._open
            ):  # something still reads: only the end of its connection ends that
                effects += [AbortPeer(peer) for peer in self._open[ticket_id].readers]
        return effects

    def _close(self, ticket_id: str, reason: CloseReason) -> list[SenderEffect]:
        ticket = self._open.get(ticket_id)
        if ticket is None:
            return []
        ticket.closing = ticket.closing or reason
        return self._finish_closing(ticket_id)

    def _finish_closing(self, ticket_id: str) -> list[SenderEffect]:
        ticket = self._open[ticket_id]
        if ticket.closing is None or ticket.is_read:
            return []
        for key in list(ticket.pulls):
            self._forget(key)
        del self._open[ticket_id]
        return [CloseTicket(ticket_id, ticket.closing)]

    def _forget(self, key: tuple[int, int]) -> None:
        del self._open[self._tickets_by_pull.pop(key)].pulls[key]
