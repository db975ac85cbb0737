"""Measures how late the event loop runs a timer, and how much of the delay this process caused.

A timer is late if this process blocked the event loop, or if another of its threads held the
interpreter. In both cases, the process used CPU time during the delay. A timer is also late if the
machine ran other processes. So the part of a delay that this process caused is at most its CPU time
in the delay. The shorter the interval between measurements, the tighter this bound is.
"""

from __future__ import annotations

import asyncio
import time

from pdmesh.telemetry import metrics, names


class LoopWatch:
    """Measures every `every_s` seconds. A delay that is shorter than this may be missed."""

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
        while True:
            asked, cpu_s = time.monotonic(), time.process_time()
            await asyncio.sleep(self._every_s)
            self.note(
                late_s=time.monotonic() - asked - self._every_s, cpu_s=time.process_time() - cpu_s
            )

    def note(self, late_s: float, cpu_s: float) -> None:
        """Note a timer's delay, and the CPU time of all threads since the timer was set."""
        self._worst_lag_s = max(self._worst_lag_s, late_s)
        self._worst_held_s = max(self._worst_held_s, min(late_s, cpu_s))

    def take(self) -> tuple[float, float]:
        """The worst delay since the last call, and the most that this process may have caused."""
        return self._take_lag(), self._take_held()

    def _take_lag(self) -> float:
        lag_s, self._worst_lag_s = self._worst_lag_s, 0.0
        return lag_s

    def _take_held(self) -> float:
        held_s, self._worst_held_s = self._worst_held_s, 0.0
        return held_s
