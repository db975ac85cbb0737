"""A virtual clock: a heap of future events.

Events with the same time happen in the order in which they were added.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Clock:
    now: float = 0.0
    num_events: int = 0
    _heap: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _next: int = 0

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(when, self.now), self._next, what))
        self._next += 1

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        self.at(self.now + delay_s, what)

    def run(self) -> None:
        """Run until no event is left."""
        while self._heap:
            self.now, _, what = heapq.heappop(self._heap)
            self.num_events += 1
            what()
