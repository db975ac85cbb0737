"""Reports about an instance's tiers: counts by tier and event, stored and removed blocks, faults.

A tier is a place for KV below the engine: the host pool, the peers' pools or files. The process
that has the tiers, possibly an engine's worker, collects the counts. It sends small reports to the
instance's host, the part outside the engine.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from pdmesh.core.kv.tier import Tier

REPORT_EVERY_S: Final = 0.05  # between two reports of a rank
MAX_FAULTS: Final = 64  # faults that wait for a report; a further fault replaces the oldest one


class TierEvent(StrEnum):
    """An event of one block. Each tier counts its blocks by event."""

    SERVED = "served"  # a request got the block from this tier and did not compute it
    PREFETCHED = "prefetched"  # the block was requested before a prompt needed it
    STORED = "stored"
    LENT = "lent"  # the block was sent to a peer
    EVICTED = "evicted"
    CORRUPT = "corrupt"  # the checksum or the header was wrong; the block is recomputed
    FAILED = "failed"  # the block was not read (and is recomputed), or it was not written
    LATE = "late"  # the block was still on its way when the request had to continue
    DROPPED = "dropped"  # the block was not moved: no room, too many waiting, or the disk is off


@dataclass(frozen=True, slots=True)
class TierFault:
    """A disk became worse or better, or a peer sent bad blocks."""

    tier: Tier
    reason: str  # KV_TIER_READ_ONLY, KV_TIER_OFF, KV_TIER_RECOVERED, KV_CORRUPT
    message: str
    source: tuple[str, int] | None = None  # the peer's instance id and incarnation


FAULTS: Final = (
    *((Tier.FILE, reason) for reason in ("KV_TIER_READ_ONLY", "KV_TIER_OFF", "KV_TIER_RECOVERED")),
    (Tier.PEER, "KV_CORRUPT"),
)
"""All combinations of tier and reason. Their metrics exist from the start, with the value 0."""


@dataclass(frozen=True, slots=True)
class TierReport:
    """The increments since the last report, and the present levels."""

    counts: dict[tuple[str, str], int]  # (tier, event)
    seconds: dict[str, float]  # the time that loads took, by tier
    bytes_used: dict[str, int]  # by tier
    stored: tuple[bytes, ...] = ()  # names of blocks that are new in the host pool
    removed: tuple[bytes, ...] = ()  # names of blocks that the host pool no longer has
    faults: tuple[TierFault, ...] = ()
    # Two numbers of blocks in the host pool; None means unchanged.
    num_pinned: int | None = None  # blocks of prefixes that an operator pinned
    num_leased: int | None = None  # blocks that are being read

    @property
    def is_empty(self) -> bool:
        is_same = self.num_pinned is None and self.num_leased is None
        news = self.counts or self.seconds or self.stored or self.removed or self.faults
        return is_same and not news


@dataclass(slots=True)
class TierCounts:
    """Collects counts and faults between two reports. Thread-safe."""

    _counts: dict[tuple[str, str], int] = field(default_factory=dict)
    _seconds: dict[str, float] = field(default_factory=dict)
    _faults: deque[TierFault] = field(default_factory=lambda: deque(maxlen=MAX_FAULTS))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    totals: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, tier: Tier, event: TierEvent, num_blocks: int = 1) -> None:
        if num_blocks == 0:
            return
        key = tier.value, event.value
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + num_blocks
            self.totals[key] = self.totals.get(key, 0) + num_blocks

    def took(self, tier: Tier, seconds: float) -> None:
        with self._lock:
            self._seconds[tier.value] = self._seconds.get(tier.value, 0.0) + seconds

    def fault(self, fault: TierFault) -> None:
        with self._lock:
            self._faults.append(fault)

    def total(self, tier: Tier, event: TierEvent) -> int:
        return self.totals.get((tier.value, event.value), 0)

    def take(self) -> tuple[dict[tuple[str, str], int], dict[str, float], tuple[TierFault, ...]]:
        with self._lock:
            taken = self._counts, self._seconds, tuple(self._faults)
            self._counts, self._seconds = {}, {}
            self._faults.clear()
        return taken
