"""Measures how late the event loop runs a timer, and how much of that this process caused.

A timer is late if something blocked the loop or, in another thread, the interpreter. It is also
late if the machine gave the cores to other processes. In the first case this process used CPU all
the time. So the process itself caused at most the lesser of the lateness and its CPU time. The more
often it measures, the tighter this bound is.
"""

from __future__ import annotations

import asyncio
import time

from pdmesh.telemetry import metrics, names


class LoopWatch:
    """Measures every `every_s` seconds. It may miss a shorter delay."""

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
        """Measure until cancelled."""
        while True:
            asked, cpu_s = time.monotonic(), time.process_time()
            await asyncio.sleep(self._every_s)
            self.note(
                late_s=time.monotonic() - asked - self._every_s, cpu_s=time.process_time() - cpu_s
            )

    def note(self, late_s: float, cpu_s: float) -> None:
        """Note how late the timer was, and how much CPU time all threads used since it was set."""
        self._worst_lag_s = max(self._worst_lag_s, late_s)
        self._worst_held_s = max(self._worst_held_s, min(late_s, cpu_s))

    def take(self) -> tuple[float, float]:
        """The worst lateness, and the worst part of it from this process, since the last call."""
        return self._take_lag(), self._take_held()

    def _take_lag(self) -> float:
        lag_s, self._worst_lag_s = self._worst_lag_s, 0.0
        return lag_s

    def _take_held(self) -> float:
        held_s, self._worst_held_s = self._worst_held_s, 0.0
        return held_s
