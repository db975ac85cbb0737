"""Bounds how often streams are written when their tokens come faster than people read.

A writer that has just written is woken again only after the interval. One timer wakes all writers
that wait. A token that comes after the interval is sent at once, so pacing never delays a stream
that is slower than the interval.

A busy gateway writes less often: the interval grows so that writers take at most a quarter of the
loop's time. Each write then has more tokens, which cost little beside the write itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

_WRITING_SHARE: Final = 0.25  # of the loop's time
_LONGEST_S: Final = 0.02  # people do not see that text comes in steps of 20 ms


class Pacer:
    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`interval_s`: the shortest interval. 0 means no pacing. `clock` in seconds."""
        self.interval_s = self._shortest_s = interval_s
        self._clock = clock
        self._waiting: list[Callable[[], None]] = []

    def later(self, wake: Callable[[], None]) -> None:
        """Call `wake` within the interval."""
        if not self._waiting:
            asyncio.get_running_loop().call_later(self.interval_s, self._wake_all)
        self._waiting.append(wake)

    def _wake_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        began = self._clock()
        for wake in waiting:
            wake()
        # The loop runs callbacks in their order, so this one comes after the writers' own.
        asyncio.get_running_loop().call_soon(self._have_written, began)

    def _have_written(self, began: float) -> None:
        wanted_s = (self._clock() - began) / _WRITING_SHARE
        self.interval_s = max(self._shortest_s, min(wanted_s, _LONGEST_S))
