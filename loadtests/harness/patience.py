"""Waits for a quiet machine before a measurement, and repeats a disturbed measurement.

There is a time limit for all of the waiting and repeating. Load from other processes makes every
number worse. So while time is left, the result of a disturbed window is dropped and only counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from loadtests.harness.results import Cell

_QUIET_PERCENT = 25.0  # a window opens below this use of all cores; an idle mesh uses little
_QUIET_CORES = 0.25  # the most cores that other processes may use in a valid window
_LOOK_S = 0.5


@dataclass(slots=True)
class Patience:
    """Repeats disturbed measurements for up to `left_s` more seconds. With 0, it measures once."""

    left_s: float
    num_dropped: int = 0

    def measure(self, window: Callable[[], Cell]) -> Cell:
        while True:
            self._wait_for_quiet()
            began = time.monotonic()
            cell = window()
            if cell.others_cores <= _QUIET_CORES or self.left_s <= 0:
                return cell
            self.num_dropped += 1
            self.left_s -= time.monotonic() - began

    def _wait_for_quiet(self) -> None:
        while self.left_s > 0 and psutil.cpu_percent(_LOOK_S) > _QUIET_PERCENT:
            self.left_s -= _LOOK_S
