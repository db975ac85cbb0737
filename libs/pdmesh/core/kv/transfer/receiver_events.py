"""What happens to a receiver's pulls, and what is to be done about it; see `receiver.py`.

The classes are not `frozen`, for speed; no code changes an instance of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Facts and effects of a connection are the same at both ends.
from pdmesh.core.kv.transfer.sender_events import AbortPeer as AbortPeer  # noqa: PLC0414
from pdmesh.core.kv.transfer.sender_events import PeerLost as PeerLost  # noqa: PLC0414
from pdmesh.core.model import Tick as Tick  # noqa: PLC0414


@dataclass(slots=True)
class PullRequested:
    """A caller wants its bytes, between `min_bytes` and `max_bytes`, by `deadline`.

    `peer` is the connection. `lease_s`: how long the sender keeps the bytes after it last heard
    from us; 0: there is no lease to renew. `stall_s`: the longest silence of a sender that has the
    bytes; infinite while they are still being computed.
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
    """The sender has all bytes by now: from here on it may be silent for at most `stall_s`."""

    pull_id: int
    stall_s: float


@dataclass(slots=True)
class MetaArrived:
    """The sender announces the next `length` bytes, at `offset` of the pull's `num_bytes`.

    `is_inline`: whether the bytes came with the message; otherwise they follow.
    """

    peer: int
    pull_id: int
    num_bytes: int
    offset: int
    length: int
    is_inline: bool


@dataclass(slots=True)
class PartArrived:
    """All bytes of part `index` are in the landing range."""

    pull_id: int
    index: int


@dataclass(slots=True)
class PartChecked:
    """The checksums of part `index` were compared."""

    pull_id: int
    index: int
    is_intact: bool


@dataclass(slots=True)
class CheckFailed:
    """Part `index` could not be checked; nothing looks at its bytes any more."""

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
    """Post the receives of part `index`; answered by PartArrived, or PeerLost."""

    pull_id: int
    index: int


@dataclass(slots=True)
class CheckPart:
    """Copy the bytes if they came inline, then compare checksums.

    Answered by PartChecked or CheckFailed.
    """

    pull_id: int
    index: int


@dataclass(slots=True)
class DeliverPart:
    """Part `index` and all earlier parts are verified: hand it to the caller, in order and once."""

    pull_id: int
    index: int


@dataclass(slots=True)
class SendAck:
    """Tell the sender that the pull is over: all of it was taken, or no more of it is wanted."""

    pull_id: int
    is_taken: bool


@dataclass(slots=True)
class RenewLease:
    """Ask the sender to keep the bytes."""

    pull_id: int


@dataclass(slots=True)
class TellSilent:
    """No byte came for SILENT_S, though the sender has the bytes: the link is free for others.

    It comes once per pull, and the pull goes on.
    """

    pull_id: int


@dataclass(slots=True)
class RetirePeer:
    """Begin no new pull on this connection. AbortPeer follows its last pull. May be repeated."""

    peer: int


@dataclass(slots=True)
class CompletePull:
    """The verified bytes, and the landing range with them, now belong to the caller."""

    pull_id: int


@dataclass(slots=True)
class FailPull:
    """Tell the caller that the pull failed. FreeLanding follows, now or later."""

    pull_id: int
    reason: str


@dataclass(slots=True)
class FreeLanding:
    """No late write can land any more: the last effect of a pull that did not complete.

    For a load, it frees the ranges of its `leg`, whether the load completed or not.
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
