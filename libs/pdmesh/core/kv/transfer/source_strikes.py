"""Decides which sources have failed too often and are excluded for a while (F23, F34).

A source that fails `limit` times within `window_s` is excluded for `excluded_s`. Then it starts
with a clean record. A single failure is repaired and forgotten, since memory and links fail once in
a while. A source that keeps failing would cost every request a recomputation.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MAX_SOURCES = 1024

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class SourceStrikes(Generic[K]):
    """`K` names a source. At most MAX_SOURCES are remembered.

    The source whose last failure is oldest is forgotten first. `is_probation`: once a source's time
    is over, its next failure excludes it again, unless it is forgiven first.
    """

    limit: int = 3
    window_s: float = 60.0
    excluded_s: float = 60.0
    is_probation: bool = False
    _strikes: OrderedDict[K, deque[float]] = field(default_factory=OrderedDict)
    _excluded_until: dict[K, float] = field(default_factory=dict)

    def __len__(self) -> int:
        """The number of sources excluded now."""
        return len(self._excluded_until)

    def record(self, source: K, now: float) -> bool:
        """A pull from `source` failed. True if that excludes it."""
        if source in self._excluded_until:
            return False  # a pull that was under way when the source was excluded
        strikes = self._remember(source)
        strikes.append(now)
        while strikes[0] <= now - self.window_s:
            strikes.popleft()
        if len(strikes) < self.limit:
            return False
        del self._strikes[source]
        if len(self._excluded_until) >= MAX_SOURCES:
            return False
        self._excluded_until[source] = now + self.excluded_s
        return True

    def _remember(self, source: K) -> deque[float]:
        strikes = self._strikes.setdefault(source, deque(maxlen=self.limit))
        self._strikes.move_to_end(source)
        if len(self._strikes) > MAX_SOURCES:
            self._strikes.popitem(last=False)
        return strikes

    def last_strike(self, source: K) -> float:
        """When the last failure that still counts came, or when probation began; -inf: neither."""
        strikes = self._strikes.get(source)
        return strikes[-1] if strikes else -math.inf

    def forgive(self, source: K) -> None:
        """Its earlier failures no longer count. An excluded source stays excluded."""
        self._strikes.pop(source, None)

    def excluded(self) -> list[K]:
        return list(self._excluded_until)

    def is_excluded(self, source: K, now: float) -> bool:
        until = self._excluded_until.get(source)
        return until is not None and now < until

    def release_due(self, now: float) -> list[K]:
        """Sources whose time is over, each returned once."""
        due = [source for source, until in self._excluded_until.items() if now >= until]
        for source in due:
            del self._excluded_until[source]
            if self.is_probation and self.limit > 1:
                self._remember(source).extend([now] * (self.limit - 1))
        return due

    def check_invariants(self) -> None:
        assert len(self._strikes) <= MAX_SOURCES
        assert len(self._excluded_until) <= MAX_SOURCES
        assert not self._strikes.keys() & self._excluded_until.keys()
        assert all(0 < len(strikes) < self.limit for strikes in self._strikes.values())
