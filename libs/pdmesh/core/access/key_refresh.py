"""Decides when a gateway fetches the keys of an identity provider, with which it verifies tokens.

The keys are fetched at intervals, and early if a token names an unknown key. There is a least time
between early fetches, so that strangers with made-up tokens cannot cause many of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_FIRST_RETRY_S = 1.0


@dataclass(slots=True)
class KeyRefresh:
    """`refresh_s` is the time between two fetches if no token causes an early one. `least_s` is the
    least time between an early fetch and the fetch before it.
    """

    refresh_s: float
    least_s: float
    _next_at: float = -math.inf
    _begun_at: float = -math.inf
    _fetched_at: float = -math.inf
    _num_failed: int = 0
    _is_running: bool = False

    def wait_s(self, now: float) -> float:
        """Seconds until the next fetch is due; 0 means that it is due now."""
        return max(0.0, self._next_at - now)

    def wants(self, now: float) -> bool:
        """A token names an unknown key. Return whether a fetch is running or may begin now."""
        if self._is_running:
            return True
        if now < self._begun_at + self.least_s:
            return False
        self._next_at = now
        return True

    def begin(self, now: float) -> None:
        self._begun_at, self._is_running = now, True

    def end(self, now: float, *, is_good: bool) -> None:
        """A fetch has ended. After a failure, retry after 1, 2, 4, ... seconds, but at most
        `refresh_s`.
        """
        self._is_running = False
        if is_good:
            self._fetched_at, self._num_failed = now, 0
            self._next_at = now + self.refresh_s
            return
        pause = min(self.refresh_s, _FIRST_RETRY_S * 2 ** min(self._num_failed, 20))
        self._num_failed += 1
        self._next_at = now + pause

    def age_s(self, now: float) -> float:
        """Seconds since the keys were last fetched. The result is infinite if they never were."""
        return now - self._fetched_at
