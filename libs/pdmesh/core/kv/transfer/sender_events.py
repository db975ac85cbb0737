"""The events and effects of a sender's tickets, which `sender.py` decides about.

A ticket is the right to pull one prompt's KV from a range of the sender's memory. An event is
something that happened to a ticket. An effect is something that the caller must do now. The classes
are not `frozen`, for speed, but no code changes their instances.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.core.kv.transfer.pull_parts import CHUNK_BYTES, KvPart
from pdmesh.core.kv.transfer.ticket import CloseReason, Refusal
from pdmesh.core.model import Tick


@dataclass(slots=True)
class OpenAsked:
    """The range for a prompt is reserved and its layout is known. The bytes are still to come.

    If `is_single`, the ticket closes with its only pull, however that pull ends. `chunk_bytes` and
    `is_tapered` decide how pulls are cut into parts, see `pull_parts`.
    """

    ticket_id: str = field(repr=False)
    attempt: int
    layout: KvLayout
    lease_s: float
    chunk_bytes: int = CHUNK_BYTES
    is_single: bool = False
    is_tapered: bool = False


@dataclass(slots=True)
class LayersReady:
    """The layers below `num_layers` are in the range, with their checksums."""

    ticket_id: str = field(repr=False)
    num_layers: int


@dataclass(slots=True)
class PullAsked:
    """A peer wants a ticket's blocks from `first_block` on. `heads` is (first, number).

    `peer` is the connection. The ticket closes when `num_takers` peers of the same `decode` have
    taken its KV. `question` is sent back with each part.
    """

    peer: int
    pull_id: int
    ticket_id: str = field(repr=False)
    attempt: int
    incarnation: int
    fingerprint_hash: int
    first_block: int = 0
    heads: tuple[int, int] | None = None
    num_takers: int = 1
    decode: int = 0
    group_hash: int = 0
    question: int = 0


@dataclass(slots=True)
class PartSent:
    """A part of a pull has been sent, so this send no longer reads the ticket's range."""

    peer: int
    pull_id: int


@dataclass(slots=True)
class PullAcked:
    """The receiver is done with a pull.

    If `is_taken`, the receiver has verified the bytes and uses them. Otherwise it wants no more of
    them.
    """

    peer: int
    pull_id: int
    is_taken: bool


@dataclass(slots=True)
class LeaseRenewed:
    """A receiver that waits or receives asks the sender to keep the bytes."""

    peer: int
    ticket_id: str = field(repr=False)
    attempt: int
    incarnation: int


@dataclass(slots=True)
class Released:
    """No peer will pull this ticket, and nothing writes into its range any more."""

    ticket_id: str = field(repr=False)


@dataclass(slots=True)
class ServingFailed:
    """The bytes of the ticket cannot be served. The engine may still write them."""

    ticket_id: str = field(repr=False)


@dataclass(slots=True)
class PeerLost:
    """A connection has ended. Nothing is sent or received on it any more."""

    peer: int


SenderEvent = (
    OpenAsked
    | LayersReady
    | PullAsked
    | PartSent
    | PullAcked
    | LeaseRenewed
    | Released
    | ServingFailed
    | PeerLost
    | Tick
)


@dataclass(slots=True)
class SendPart:
    """Announce and send a part of a pull of `num_bytes`. The answer is PartSent or PeerLost."""

    peer: int
    pull_id: int
    ticket_id: str = field(repr=False)
    part: KvPart
    num_bytes: int
    question: int = 0


@dataclass(slots=True)
class RefusePull:
    """Refuse a pull, or stop it. No part of the pull is announced after this."""

    peer: int
    pull_id: int
    refusal: Refusal


@dataclass(slots=True)
class AbortPeer:
    """Drop the connection. The answer is PeerLost. May be repeated."""

    peer: int


@dataclass(slots=True)
class CloseTicket:
    """Close the ticket and free its bytes. This is the last effect of a ticket."""

    ticket_id: str = field(repr=False)
    reason: CloseReason


SenderEffect = SendPart | RefusePull | AbortPeer | CloseTicket
