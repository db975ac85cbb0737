"""How late the event loop runs a timer, and how much of that this process caused.

A timer is late because something held the loop or (in another thread) the interpreter, or because
the machine gave the cores to others. In the first case the process used CPU all the while. So the
lesser of lateness and CPU time is what the process caused itself: an upper bound, and a close one
if it looks often.
"""

from __future__ import annotations

import asyncio
import time

from pdmesh.telemetry import metrics, names


class LoopWatch:
    """Looks every `every_s` seconds; a shorter delay is seen only by luck."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._worst_lag_s = self._worst_held_s = 0.0
        metrics.gauge(
            names.LOOP_LAG, "Worst delay of a timer since the last scrape", self._take_lag, "s"
        )
        metrics.gauge(
            names.LOOP_HELD,
            "Largest part of a timer's delay since the last scrape that this process can have "
            "caused itself",
            self._take_held,
            "s",
        )

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            asked, cpu_s = time.monotonic(), time.process_time()
            await asyncio.sleep(self._every_s)
            self.note(
                late_s=time.monotonic() - asked - self._every_s, cpu_s=time.process_time() - cpu_s
            )

    def note(self, late_s: float, cpu_s: float) -> None:
        """One look: how late the timer was, and what all threads computed since it was set."""
        self._worst_lag_s = max(self._worst_lag_s, late_s)
        self._worst_held_s = max(self._worst_held_s, min(late_s, cpu_s))

    def take(self) -> tuple[float, float]:
        """(lateness, part of it that was computed here), each the worst since the last read."""
        return self._take_lag(), self._take_held()

    def _take_lag(self) -> float:
        lag_s, self._worst_lag_s = self._worst_lag_s, 0.0
        return lag_s

    def _take_held(self) -> float:
        held_s, self._worst_held_s = self._worst_held_s, 0.0
        return held_s
