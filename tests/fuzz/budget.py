"""How much work an input may cost: so many times what an honest one of the longest length does, on
this machine and under this instrumentation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

MOST: Final = 50
_TRIES: Final = 4


class Budget:
    """Feeds, and fails if an input costs more each time it is tried.

    CPU time of this thread: what else runs does not count.
    """

    def __init__(self, feed: Callable[[bytes], None], honest: bytes, most: int = MOST) -> None:
        self._feed = feed
        feed(honest)  # what is made once
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
