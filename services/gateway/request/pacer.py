"""Bounds how often streams are written to when their tokens come faster than people read.

A writer that has just written is woken again only after the interval, by one timer together with
all others that wait. A token that comes later than that is sent at once: pacing never delays a
stream that is slower than the interval.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Pacer:
    def __init__(self, interval_s: float) -> None:
        """0: no pacing."""
        self.interval_s = interval_s
        self._waiting: list[Callable[[], None]] = []

    def later(self, wake: Callable[[], None]) -> None:
        """Call `wake` within the interval."""
        if not self._waiting:
            asyncio.get_running_loop().call_later(self.interval_s, self._wake_all)
        self._waiting.append(wake)

    def _wake_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()
