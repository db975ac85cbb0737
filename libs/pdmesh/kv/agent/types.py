"""The types that users of a KV agent (`agent.py`) exchange with it.

They are the agent's identity, its events, results and counters, and the pool of KV blocks that
peers may fetch from. A ticket is the right to pull one prompt's KV from a range of the staging
arena. A pull writes the KV to a range of the landing arena.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdmesh.core.kv.transfer.incoming_events import (
    AgentLandingFreed as AgentLandingFreed,  # noqa: PLC0414
)
from pdmesh.kv.transport.base import ArenaBytes, ByteArray


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    instance_id: str
    incarnation: int
    model_fingerprint: str
    rank: int = 0
    group_id: str = ""  # the agent hands KV only to instances of this group (S13)


@dataclass(frozen=True, slots=True)
class AgentTicketClosed:
    """No peer reads the ticket's staging range any more. Reported once per opened ticket."""

    ticket_id: str
    reason: str  # taken, released, expired, failed


AgentEvent = AgentTicketClosed | AgentLandingFreed

# Called with the offset in the landing range and the verified bytes there. The calls come in order
# of the offsets, without gaps, with whole blocks. The function must not raise.
OnRange = Callable[[int, ArenaBytes], None]


@dataclass(frozen=True, slots=True)
class PullResult:
    num_bytes: int
    duration_s: float
    first_range_s: float = 0.0  # time from the call to the first verified bytes
    num_ranges: int = 1
    num_metas: int = 1
    checksums: Sequence[bytes] = ()  # the sender's checksum of each range, in order


@dataclass(frozen=True, slots=True)
class AgentStats:
    """The numbers of open tickets, pulls, sends and peers, and counters since the start."""

    num_tickets: int
    num_pulls: int
    num_sends: int
    num_peers: int
    bytes_sent: int
    bytes_received: int
    num_corrupt: int  # pulls whose checksum did not match
    messages_sent: dict[str, int]  # by kind: pull, meta, ack, pullrefusal, ...


class AgentHooks:
    """Faults for tests. A test overrides the methods that it needs. Production passes no hooks."""

    def is_dropped(self, pull_id: int) -> bool:
        """On the receiver: whether to drop the sender's answer, as a bad link does."""
        return False

    def on_received(self, payload: ArenaBytes) -> None:
        """On the receiver: a part's bytes have arrived and are not verified yet."""

    def on_verified(self, payload: ArenaBytes) -> None:
        """On the receiver: a part's bytes are verified. The caller gets them next."""

    def part_delay_s(self, pull_id: int, offset: int) -> float:
        """On the sender: how long a part waits before it is announced."""
        return 0.0


@dataclass(frozen=True, slots=True)
class PinnedBlocks:
    """Blocks of a pool that the pool does not evict or move before `BlockSource.close`.

    All views have the same length.
    """

    views: Sequence[ByteArray]  # pools are in the host's memory
    checksums: Sequence[bytes] = ()  # xxh3_128 digests, or none


class BlockSource(Protocol):
    """A pool whose blocks peers may fetch by name.

    The agent calls the methods on its event loop, so they must be quick.
    """

    def open(self, names: Sequence[bytes]) -> PinnedBlocks | None:
        """Pin the blocks of `names` up to the first one that the pool lacks.

        Returns None or no views if the pool lacks the first block.
        """
        ...

    def close(self, pinned: PinnedBlocks) -> None:
        """Unpin blocks that the agent no longer reads.

        The agent calls this once per `open` that returned views.
        """
        ...
