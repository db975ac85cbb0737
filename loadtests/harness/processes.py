"""Measures each process of a run through psutil: CPU seconds and resident memory, by name."""

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
    """Named processes, each with the child processes (an engine's workers) that it has by now."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._families: dict[str, list[psutil.Process]] = {}
        for name, pid in sorted(pids.items()):
            process = psutil.Process(pid)
            self._families[name] = [process, *process.children(recursive=True)]

    def costs(self) -> dict[str, Cost]:
        """The cost of each family (a process and its children) since it began.

        A family with a dead member is left out.
        """
        costs: dict[str, Cost] = {}
        for name, family in self._families.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                costs[name] = _cost(family)
        return costs


def _cost(family: list[psutil.Process]) -> Cost:
    times = [process.cpu_times() for process in family]
    rss_bytes = sum(process.memory_info().rss for process in family)
    return Cost(sum(t.user + t.system for t in times), rss_bytes)


def thread_cpu_s(pid: int) -> dict[int, float]:
    """CPU seconds of each thread of a process, by thread id.

    The first thread has the id of the process. The kernel counts in ticks, usually of 10 ms.
    """
    return {t.id: t.user_time + t.system_time for t in psutil.Process(pid).threads()}


def machine_busy_s() -> float:
    """CPU seconds of all cores together since boot, including time that the host took away."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def cpu_between(before: Mapping[str, Cost], after: Mapping[str, Cost]) -> dict[str, float]:
    """CPU seconds that each process used between two samples. Processes that died are left out."""
    return {name: after[name].cpu_s - before[name].cpu_s for name in before if name in after}
