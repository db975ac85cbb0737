"""What happens to a sender's tickets, and what is to be done about it; see `sender.py`.

The classes are not `frozen`, for speed; no code changes an instance of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.core.kv.transfer.pull_parts import CHUNK_BYTES, KvPart
from pdmesh.core.kv.transfer.ticket import CloseReason, Refusal
from pdmesh.core.model import Tick


@dataclass(slots=True)
class OpenAsked:
    """A prompt's range is reserved and its layout known; its bytes are still to come.

    `is_single`: the ticket closes with its only pull, however the pull ends. `chunk_bytes` and
    `is_tapered` decide how its pulls are cut into parts; see `pull_parts`.
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
    """The layers below `num_layers` are in place, with their checksums."""

    ticket_id: str = field(repr=False)
    num_layers: int


@dataclass(slots=True)
class PullAsked:
    """A peer wants a ticket's blocks from `first_block` on; `heads` is (first, number).

    `peer` is the connection. `num_takers`: how many peers of its `decode` must take this ticket
    before it is closed. `question` goes back with each part.
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
    """A part of a pull has left the ticket's range; nothing reads it for this part any more."""

    peer: int
    pull_id: int


@dataclass(slots=True)
class PullAcked:
    """The receiver is done.

    `is_taken`: it has verified the bytes and uses them; if false, it only wants no more.
    """

    peer: int
    pull_id: int
    is_taken: bool


@dataclass(slots=True)
class LeaseRenewed:
    """A receiver that waits or receives asks to keep the bytes."""

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
    """The ticket's bytes cannot be served. Its engine may still write them."""

    ticket_id: str = field(repr=False)


@dataclass(slots=True)
class PeerLost:
    """A connection has ended: nothing is sent on it, and nothing written from it, any more."""

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
    """Announce and send a part of a pull of `num_bytes`; answered by PartSent or PeerLost."""

    peer: int
    pull_id: int
    ticket_id: str = field(repr=False)
    part: KvPart
    num_bytes: int
    question: int = 0


@dataclass(slots=True)
class RefusePull:
    """No part of this pull is announced after this."""

    peer: int
    pull_id: int
    refusal: Refusal


@dataclass(slots=True)
class AbortPeer:
    """Drop the connection; answered by PeerLost. May be repeated."""

    peer: int


@dataclass(slots=True)
class CloseTicket:
    """The ticket's bytes are free. The last effect of a ticket."""

    ticket_id: str = field(repr=False)
    reason: CloseReason


SenderEffect = SendPart | RefusePull | AbortPeer | CloseTicket
