"""The events and effects of a receiver's pulls of KV, which `receiver.py` decides about.

A pull's landing is the range of memory that the pull writes to. An event is something that happened
to a pull. An effect is something that the caller must do now. The classes are not `frozen`, for
speed, but no code changes their instances.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# The events and effects of a connection are the same for sender and receiver.
from pdmesh.core.kv.transfer.sender_events import AbortPeer as AbortPeer  # noqa: PLC0414
from pdmesh.core.kv.transfer.sender_events import PeerLost as PeerLost  # noqa: PLC0414
from pdmesh.core.model import Tick as Tick  # noqa: PLC0414


@dataclass(slots=True)
class PullRequested:
    """A caller wants to pull between `min_bytes` and `max_bytes` by `deadline`.

    `peer` is the connection. `lease_s` is how long the sender keeps the bytes after it last heard
    from us, or 0 if there is no lease to renew. `stall_s` is the longest silence that is allowed to
    a sender that has the bytes. It is infinite while the bytes are still being computed.
    """

    pull_id: int
    peer: int
    min_bytes: int
    max_bytes: int
    deadline: float
    lease_s: float = 0.0
    stall_s: float = math.inf


@dataclass(slots=True)
class SourceComplete:
    """The sender has all bytes by now. From now on it may be silent for at most `stall_s`."""

    pull_id: int
    stall_s: float


@dataclass(slots=True)
class MetaArrived:
    """The sender announces the next `length` bytes, at `offset` of the pull's `num_bytes`.

    If `is_inline`, the bytes came with the message. Otherwise they follow.
    """

    peer: int
    pull_id: int
    num_bytes: int
    offset: int
    length: int
    is_inline: bool


@dataclass(slots=True)
class PartArrived:
    """All bytes of part `index` are in the landing."""

    pull_id: int
    index: int


@dataclass(slots=True)
class PartChecked:
    """The checksums of part `index` have been compared."""

    pull_id: int
    index: int
    is_intact: bool


@dataclass(slots=True)
class CheckFailed:
    """Part `index` could not be checked. Nothing reads its bytes any more."""

    pull_id: int
    index: int


@dataclass(slots=True)
class PullRefused:
    """The sender will announce no more parts of the pull."""

    peer: int
    pull_id: int
    reason: str


@dataclass(slots=True)
class CallerLeft:
    """The caller no longer wants the result."""

    pull_id: int


ReceiverEvent = (
    PullRequested
    | SourceComplete
    | MetaArrived
    | PartArrived
    | PartChecked
    | CheckFailed
    | PullRefused
    | CallerLeft
    | PeerLost
    | Tick
)


@dataclass(slots=True)
class SendPull:
    pull_id: int


@dataclass(slots=True)
class ReceivePart:
    """Post the receives of part `index`. The answer is PartArrived or PeerLost."""

    pull_id: int
    index: int


@dataclass(slots=True)
class CheckPart:
    """Copy the bytes if they came inline, then compare checksums.

    The answer is PartChecked or CheckFailed.
    """

    pull_id: int
    index: int


@dataclass(slots=True)
class DeliverPart:
    """Hand part `index` to the caller, once and in order: all parts up to it are verified."""

    pull_id: int
    index: int


@dataclass(slots=True)
class SendAck:
    """Tell the sender that the pull has ended: all bytes were taken, or no more are wanted."""

    pull_id: int
    is_taken: bool


@dataclass(slots=True)
class RenewLease:
    """Ask the sender to keep the bytes."""

    pull_id: int


@dataclass(slots=True)
class TellSilent:
    """Report that no byte came for SILENT_S, though the sender has the bytes.

    The link is free for other pulls. The effect comes once per pull, and the pull goes on.
    """

    pull_id: int


@dataclass(slots=True)
class RetirePeer:
    """Begin no new pull on this connection. AbortPeer follows its last pull. May be repeated."""

    peer: int


@dataclass(slots=True)
class CompletePull:
    """The pull is complete. The landing, with the verified bytes, now belongs to the caller."""

    pull_id: int


@dataclass(slots=True)
class FailPull:
    """Tell the caller that the pull failed. FreeLanding follows, now or later."""

    pull_id: int
    reason: str


@dataclass(slots=True)
class FreeLanding:
    """The landing may be used again, because no late write can reach it.

    This is the last effect of a pull that did not complete. `incoming_blocks.py` uses the same
    effect for a load, which is a pull with the blocks that it fills. Then `owner` is the load's
    leg, which is a request's stay on one instance, and all landings of the load are free.
    """

    owner: int  # pull id or leg


ReceiverEffect = (
    SendPull
    | ReceivePart
    | CheckPart
    | DeliverPart
    | SendAck
    | RenewLease
    | TellSilent
    | CompletePull
    | FailPull
    | FreeLanding
    | RetirePeer
    | AbortPeer
)
