"""What the tiers of an instance did: counts by tier and event, blocks that came and went, faults.

It is collected where the bytes are, possibly in an engine's worker, and reported to the host in
small pieces.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from pdmesh.core.kv.tier import Tier

REPORT_EVERY_S: Final = 0.05  # how often a rank reports to the instance's host
MAX_FAULTS: Final = 64  # that wait to be reported; further ones push out the oldest


class TierEvent(StrEnum):
    """What is counted in blocks, per tier."""

    SERVED = "served"  # a request got it from here and did not compute it
    PREFETCHED = "prefetched"  # asked for before a request needed it
    STORED = "stored"
    LENT = "lent"  # sent to a peer
    EVICTED = "evicted"
    CORRUPT = "corrupt"  # a checksum or header did not match; recomputed
    FAILED = "failed"  # could not be read or written; a block not read is recomputed
    LATE = "late"  # still on its way when the request had to continue
    DROPPED = "dropped"  # not stored: no room, or too many blocks waited


@dataclass(frozen=True, slots=True)
class TierFault:
    """A tier became worse or better, or a peer sent bad blocks."""

    tier: Tier
    reason: str  # KV_TIER_READ_ONLY, KV_TIER_OFF, KV_TIER_RECOVERED, KV_CORRUPT
    message: str
    source: tuple[str, int] | None = None  # instance and incarnation of the peer


FAULTS: Final = (
    *((Tier.FILE, reason) for reason in ("KV_TIER_READ_ONLY", "KV_TIER_OFF", "KV_TIER_RECOVERED")),
    (Tier.PEER, "KV_CORRUPT"),
)
"""The tiers and reasons of faults; metrics count them from 0."""


@dataclass(frozen=True, slots=True)
class TierReport:
    """Increments since the last report, and levels as they are now."""

    counts: dict[tuple[str, str], int]  # (tier, event)
    seconds: dict[str, float]  # by tier: the time that loads took
    bytes_used: dict[str, int]
    stored: tuple[bytes, ...] = ()  # into the host pool
    removed: tuple[bytes, ...] = ()
    faults: tuple[TierFault, ...] = ()
    num_pinned: int | None = None  # blocks of pinned prefixes in the host pool; None: unchanged
    num_leased: int | None = None  # blocks of the host pool that are being read; None: unchanged

    @property
    def is_empty(self) -> bool:
        is_same = self.num_pinned is None and self.num_leased is None
        news = self.counts or self.seconds or self.stored or self.removed or self.faults
        return is_same and not news


@dataclass(slots=True)
class TierCounts:
    """Thread-safe."""

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
