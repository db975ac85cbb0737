"""Decides in which order an engine's step serves requests of different priority (S83).

A lower priority number is more urgent. A request of priority p takes its turn as if it had arrived
p x `CLASS_S` later. So a more urgent request overtakes only those that arrived less than the
difference of priorities x `CLASS_S` before it, and none starves. Requests of one priority are
served in order of arrival.

Between two steps, a prompt under way stands back for a more urgent one that could begin; otherwise
its own chunks would fill the steps. It keeps its blocks, and continues when no such prompt waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

DEFAULT_PRIORITY: Final = 1  # of a tenant whose entry has none, and of a job without one
MAX_PRIORITY: Final = 1_000_000
# Half of the time that a gateway gives a first token by default, so that the next class is served
# in time, too.
CLASS_S: Final = 5.0


class SchedulingPolicy(StrEnum):
    """The setting. FCFS: by arrival alone, whatever the priorities."""

    PRIORITY = "priority"
    FCFS = "fcfs"


@dataclass(frozen=True, slots=True)
class Urgency:
    """What decides a request's order. `arrived_at`: seconds of any clock, the same for all."""

    priority: int
    arrived_at: float

    @property
    def turn_at(self) -> float:
        """When its turn is; prompts are served in the order of their turns."""
        return self.arrived_at + self.priority * CLASS_S

    def stands_back_for(self, waiting: Urgency) -> bool:
        """Whether a prompt under way lets a waiting one pass; it lets none of its own class."""
        return waiting.priority < self.priority and waiting.turn_at < self.turn_at


def has_several_classes(priorities: Iterable[int]) -> bool:
    """Whether the order by urgency can differ from the order of arrival."""
    return len(set(priorities)) > 1
