"""Limits the work for an input to a multiple of the work for the longest honest input.

The work for both inputs is measured on the same machine, under the same instrumentation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

MOST: Final = 50
_TRIES: Final = 4


class Budget:
    """Feeds inputs to a fuzz target, and fails if every attempt with one input exceeds the limit.

    The cost is the CPU time of this thread, so other threads have no effect.
    """

    def __init__(self, feed: Callable[[bytes], None], honest: bytes, most: int = MOST) -> None:
        self._feed = feed
        feed(honest)  # do one-time work first
        self.allowed_s = most * max(self._cost_s(honest) for _ in range(5))

    def __call__(self, data: bytes) -> None:
        costs_s: list[float] = []
        while not costs_s or (costs_s[-1] > self.allowed_s and len(costs_s) < _TRIES):
            costs_s.append(self._cost_s(data))
        assert min(costs_s) <= self.allowed_s, f"{costs_s} s, and {self.allowed_s} are allowed"

    def _cost_s(self, data: bytes) -> float:
        began = time.thread_time()
        self._feed(data)
        return time.thread_time() - began
