"""The events and effects of a decode rank's KV loads, which `incoming_blocks.py` decides about.

A load pulls one prompt's KV into landings (ranges of registered memory) and scatters it into the
request's blocks. The leg, a request's stay on one instance, identifies the load. A ticket is the
right to pull the KV from its sender, for the length of a lease.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from pdmesh.core.kv.transfer.receiver_events import FreeLanding
from pdmesh.core.model import Tick


@dataclass(frozen=True, slots=True)
class LoadStarted:
    """A request's blocks are allocated, and the KV of its prompt is to be pulled into them.

    `landings` has the offsets of the ranges that the pull writes to. The load waits for its turn in
    the queue of `source`, for at most `timeout_s`. If `source` is None, the load does not wait. If
    `is_early`, the load may start before prefill has drawn token 1. If `has_blocks` is false, the
    pull only tells the sender that this rank already has all KV.
    """

    leg: int
    landings: tuple[int, ...]
    source: Hashable | None
    num_bytes: int
    timeout_s: float
    is_early: bool = False
    has_blocks: bool = True


@dataclass(frozen=True, slots=True)
class FirstTokenKnown:
    """The prefill of an early load is done. This event may come before the load starts."""

    leg: int


@dataclass(frozen=True, slots=True)
class RangeVerified:
    """Some bytes in a landing of the load are verified."""

    leg: int


@dataclass(frozen=True, slots=True)
class RangeScattered:
    """The copying that one Scatter effect ordered has ended, with or without success."""

    leg: int


@dataclass(frozen=True, slots=True)
class PullFellSilent:
    """No byte of the pull has come for a while, though the sender has the bytes."""

    leg: int


@dataclass(frozen=True, slots=True)
class LoadFailure:
    reason: str  # a `KvTransferFailed.reason`, see `PullFailure`
    message: str


@dataclass(frozen=True, slots=True)
class PullEnded:
    """The pull has ended. No write can reach the ranges in `landings` any more.

    For the load's other ranges, the KV agent sends AgentLandingFreed.
    """

    leg: int
    failure: LoadFailure | None
    landings: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadCancelled:
    """The request has ended, so its KV is no longer wanted."""

    leg: int


@dataclass(frozen=True, slots=True)
class AgentLandingFreed:
    """No late write can reach the landing at `offset`.

    The KV agent sends this event once for each pull that failed or was cancelled.
    """

    offset: int


IncomingEvent = (
    LoadStarted
    | FirstTokenKnown
    | RangeVerified
    | RangeScattered
    | PullFellSilent
    | PullEnded
    | LoadCancelled
    | AgentLandingFreed
    | Tick
)


@dataclass(frozen=True, slots=True)
class KeepLease:
    """Renew the lease of the load's ticket, because the load waits for its turn."""

    leg: int


@dataclass(frozen=True, slots=True)
class StopRenewing:
    """Stop renewing the lease, because the load ended before its turn."""

    leg: int


@dataclass(frozen=True, slots=True)
class StartPull:
    """Start the pull. The answer is PullEnded.

    If `awaits_prefill`, the sender may be silent until token 1 is known.
    """

    leg: int
    awaits_prefill: bool


@dataclass(frozen=True, slots=True)
class CancelPull:
    """Cancel the pull. The answer is PullEnded."""

    leg: int


@dataclass(frozen=True, slots=True)
class BoundSilence:
    """Bound the sender's silence from now on, because the sender has all bytes."""

    leg: int


@dataclass(frozen=True, slots=True)
class Scatter:
    """Copy the verified bytes into the blocks. The answer is RangeScattered."""

    leg: int


@dataclass(frozen=True, slots=True)
class ReportLoad:
    """Report the outcome of a load, once, unless it was cancelled or has no blocks.

    `waited_s` is the time in which only bytes were missing: from the moment at which prefill was
    done and the load's turn had come, until the end. It is 0 if there was no such moment.
    """

    leg: int
    failure: LoadFailure | None
    duration_s: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class CompleteLoad:
    """Let the engine compute the request: the KV is in the blocks and token 1 is known."""

    leg: int


@dataclass(frozen=True, slots=True)
class ReleaseBlocks:
    """Free the blocks for other requests, because nothing is written into them any more."""

    leg: int


IncomingEffect = (
    KeepLease
    | StopRenewing
    | StartPull
    | CancelPull
    | BoundSilence
    | Scatter
    | ReportLoad
    | CompleteLoad
    | ReleaseBlocks
    | FreeLanding
)
