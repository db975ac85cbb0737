"""Bounds how often streams are written when their tokens come faster than people read.

A writer that has just written is woken again only after the interval. One timer wakes all writers
that wait. A token that comes after the interval is sent at once, so pacing never delays a stream
that is slower than the interval.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Pacer:
    def __init__(self, interval_s: float) -> None:
        """An interval of 0 means no pacing."""
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
