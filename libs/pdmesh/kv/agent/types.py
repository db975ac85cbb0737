"""The agent's interface for its users: events, results, counters, and the pool for fetches."""

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
    group_id: str = ""  # KV is handed on only within it (S13)


@dataclass(frozen=True, slots=True)
class AgentTicketClosed:
    """Nothing reads the ticket's staging range any more. It comes once per opened ticket."""

    ticket_id: str
    reason: str  # taken, released, expired, failed


AgentEvent = AgentTicketClosed | AgentLandingFreed

# Gets verified bytes that lie at `offset` of the landing range: in order, without gaps, in whole
# blocks. Must not raise.
OnRange = Callable[[int, ArenaBytes], None]


@dataclass(frozen=True, slots=True)
class PullResult:
    num_bytes: int
    duration_s: float
    first_range_s: float = 0.0  # from the call to the first verified bytes
    num_ranges: int = 1
    num_metas: int = 1
    checksums: Sequence[bytes] = ()  # of each range, in order, as the sender made them


@dataclass(frozen=True, slots=True)
class AgentStats:
    """Counters since the start, and what is held now."""

    num_tickets: int
    num_pulls: int
    num_sends: int
    num_peers: int
    bytes_sent: int
    bytes_received: int
    num_corrupt: int  # pulls whose checksum did not match
    messages_sent: dict[str, int]  # by kind: pull, meta, ack, pullrefusal, ...


class AgentHooks:
    """Faults for tests; production passes no hooks. Override what should go wrong."""

    def is_dropped(self, pull_id: int) -> bool:
        """Receiver: the sender's answer is lost."""
        return False

    def on_received(self, payload: ArenaBytes) -> None:
        """Receiver: a part's bytes landed and are not verified yet."""

    def on_verified(self, payload: ArenaBytes) -> None:
        """Receiver: a part's bytes were verified and go to the caller next."""

    def part_delay_s(self, pull_id: int, offset: int) -> float:
        """Sender: how long a part waits before it is announced."""
        return 0.0


@dataclass(frozen=True, slots=True)
class PinnedBlocks:
    """Blocks of a pool that stay in place until they are closed.

    All views have the same length.
    """

    views: Sequence[ByteArray]  # pools are in the host's memory
    checksums: Sequence[bytes] = ()  # xxh3_128 digests, or none


class BlockSource(Protocol):
    """A pool whose blocks peers may fetch by name. Called on the agent's loop; must be quick."""

    def open(self, names: Sequence[bytes]) -> PinnedBlocks | None:
        """Pin the longest beginning of `names` that is held. None or no views: nothing is held."""
        ...

    def close(self, pinned: PinnedBlocks) -> None:
        """Nothing reads the views any more. Called once per `open` that returned views."""
        ...
