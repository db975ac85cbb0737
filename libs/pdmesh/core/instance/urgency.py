"""Decides in which order an engine's step serves requests of different priority (S83).

A lower priority number is more urgent. A request's turn is its arrival plus `CLASS_S` for each unit
of its priority, and requests are served in the order of their turns. So a more urgent request
overtakes an earlier one only if it arrives less than `CLASS_S` later for each unit by which their
priorities differ. No request waits forever. Requests of one priority are served in order of
arrival.

A prompt that is being computed stands back for a more urgent prompt that could begin. Otherwise its
own tokens would fill all steps until its end. The prompt that stands back keeps its blocks, and
continues when no more urgent prompt waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

DEFAULT_PRIORITY: Final = 1  # for a tenant or a job that has no priority set
MAX_PRIORITY: Final = 1_000_000
# Half of the time that a gateway allows by default until the first token. So a request whose
# priority is less urgent by one is also served in time.
CLASS_S: Final = 5.0


class SchedulingPolicy(StrEnum):
    """The setting. FCFS serves requests by arrival alone."""

    PRIORITY = "priority"
    FCFS = "fcfs"


@dataclass(frozen=True, slots=True)
class Urgency:
    """What decides a request's order. `arrived_at` is in seconds of one clock for all requests."""

    priority: int
    arrived_at: float

    @property
    def turn_at(self) -> float:
        """The time of the request's turn. Prompts are served in the order of their turns."""
        return self.arrived_at + self.priority * CLASS_S

    def stands_back_for(self, waiting: Urgency) -> bool:
        """Whether a prompt that is being computed lets a more urgent one that waits go first."""
        return waiting.priority < self.priority and waiting.turn_at < self.turn_at


def has_several_classes(priorities: Iterable[int]) -> bool:
    """Whether the order by urgency can differ from the order of arrival."""
    return len(set(priorities)) > 1
