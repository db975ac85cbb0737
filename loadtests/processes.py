"""What each process of a run costs: CPU seconds and resident memory, by name, through psutil."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Cost:
    cpu_s: float
    rss_bytes: int


class ProcessSet:
    """Named processes; those that share a name's stem (`gateway-0`, `gateway-1`) keep their own lines."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in sorted(pids.items())}

    def names(self) -> list[str]:
        return list(self._processes)

    def costs(self) -> dict[str, Cost]:
        """Since each process began. A process that has died is left out."""
        costs: dict[str, Cost] = {}
        for name, process in self._processes.items():
            with contextlib.suppress(psutil.NoSuchProcess), process.oneshot():
                times = process.cpu_times()
                costs[name] = Cost(times.user + times.system, process.memory_info().rss)
        return costs


def machine_busy_s() -> float:
    """CPU seconds all cores together have spent on anything since boot, those stolen by the host included."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def cpu_between(before: Mapping[str, Cost], after: Mapping[str, Cost]) -> dict[str, float]:
    """CPU seconds each process used between two samples; one that died in between is left out."""
    return {name: after[name].cpu_s - before[name].cpu_s for name in before if name in after}
