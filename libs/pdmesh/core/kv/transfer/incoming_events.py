"""What happens to a decode rank's KV loads, and what is to be done; see `incoming_blocks.py`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from pdmesh.core.kv.transfer.receiver_events import FreeLanding
from pdmesh.core.model import Tick


@dataclass(frozen=True, slots=True)
class LoadStarted:
    """A request's blocks are allocated, and its KV is to be pulled into them.

    `landings`: the offsets of the ranges that its pull lands in. `source`: the source in whose
    queue it waits for its turn, for at most `timeout_s`; None: it takes no turn. `is_early`: token
    1 is not known yet. Without blocks, the pull only tells the sender that all KV is here.
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
    """Prefill of an early load is done. It may come before the load starts."""

    leg: int


@dataclass(frozen=True, slots=True)
class RangeVerified:
    """Verified bytes lie in a landing range of the load."""

    leg: int


@dataclass(frozen=True, slots=True)
class RangeScattered:
    """The copying that one Scatter ordered has ended, with or without success."""

    leg: int


@dataclass(frozen=True, slots=True)
class PullFellSilent:
    """No byte of the pull has come for a while, though the sender has the bytes."""

    leg: int


@dataclass(frozen=True, slots=True)
class LoadFailure:
    reason: str  # as `KvTransferFailed.reason`; see `PullFailure`
    message: str


@dataclass(frozen=True, slots=True)
class PullEnded:
    """`landings`: ranges that no write can reach any more. The KV agent reports the others."""

    leg: int
    failure: LoadFailure | None
    landings: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadCancelled:
    """The request ended: its KV is no longer wanted."""

    leg: int


@dataclass(frozen=True, slots=True)
class AgentLandingFreed:
    """No late write can reach the landing range at `offset`.

    The KV agent reports it once for each pull that failed or was cancelled.
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
    """The load waits for its turn: renew its ticket's lease."""

    leg: int


@dataclass(frozen=True, slots=True)
class StopRenewing:
    """The load ended before its turn."""

    leg: int


@dataclass(frozen=True, slots=True)
class StartPull:
    """Answered by PullEnded. `awaits_prefill`: the sender may be silent until token 1 is known."""

    leg: int
    awaits_prefill: bool


@dataclass(frozen=True, slots=True)
class CancelPull:
    """Answered by PullEnded."""

    leg: int


@dataclass(frozen=True, slots=True)
class BoundSilence:
    """The sender has all bytes by now: its silence counts from now on."""

    leg: int


@dataclass(frozen=True, slots=True)
class Scatter:
    """Copy the verified bytes into the blocks; answered by RangeScattered."""

    leg: int


@dataclass(frozen=True, slots=True)
class ReportLoad:
    """Report the outcome of the pull, once per load that is not cancelled.

    `waited_s`: from when its turn had come and prefill was done until it ended; otherwise 0.
    """

    leg: int
    failure: LoadFailure | None
    duration_s: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class CompleteLoad:
    """The KV is in the blocks and token 1 is known: the request may compute."""

    leg: int


@dataclass(frozen=True, slots=True)
class ReleaseBlocks:
    """The blocks may go to another request: nothing is written into them any more."""

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
