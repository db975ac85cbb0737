"""Measures the pauses of Python's garbage collector, during which all threads of the process wait.

The length of a pause depends on the number of objects that the collection visits. A collection of
the youngest generation (0) visits the objects made since the last collection. One of the oldest (2)
visits all objects, except those that `service_process` has frozen.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from pdmesh.telemetry import metrics, names

_pauses = metrics.histogram(
    names.GC_PAUSE, "Pauses of all threads for garbage collection, by generation"
)
_GENERATIONS: Final = {n: MappingProxyType({"generation": str(n)}) for n in range(3)}


class GcWatch:
    """A callback for the `gc` module. Collections never overlap, even if threads begin them."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        record: Callable[[float, Mapping[str, str]], None] = _pauses.record,
    ) -> None:
        self._clock, self._record = clock, record
        self._began_s: float | None = None

    def __call__(self, phase: str, info: Mapping[str, int]) -> None:
        """`phase` is "start" or "stop"."""
        if phase == "start":
            self._began_s = self._clock()
        elif self._began_s is not None:
            took_s, self._began_s = self._clock() - self._began_s, None
            self._record(took_s, _GENERATIONS[info["generation"]])

    def start(self) -> None:
        gc.callbacks.append(self)

    def stop(self) -> None:
        gc.callbacks.remove(self)
