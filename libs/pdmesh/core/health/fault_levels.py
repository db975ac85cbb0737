"""The levels of faults, and the one action for each level (P/D-Serve 3.4, S34).

Faults of several levels are repaired without replacing the node. So a level names the smallest
thing whose replacement repairs the fault: nothing, a request, a process, an instance, a node. The
level says which action is right if the fault is real. `fault_judge` decides whether the fault is
real, and whether the fleet can bear the action.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


class Level(enum.IntEnum):
    """L0 to L5. The last level is the worst."""

    WELL = 0
    TRANSIENT = 1
    PROCESS = 2
    INSTANCE = 3
    NODE = 4
    LOST = 5


class FaultAction(enum.Enum):
    IGNORE = "ignore"
    RETRY = "retry"
    RESTART_PROCESS = "restart_process"
    REPLACE_INSTANCE = "replace_instance"
    DRAIN_NODE = "drain_node"
    EJECT_NODE = "eject_node"


@dataclass(frozen=True, slots=True)
class Response:
    """The response to a level: an action, and whether the instance finishes its requests.

    If `finishes_running` is true, running requests may stay on the instance until they end.
    """

    action: FaultAction
    finishes_running: bool


RESPONSES: Final[Mapping[Level, Response]] = MappingProxyType(
    {
        Level.WELL: Response(FaultAction.IGNORE, True),  # corrected memory errors, a warm device
        Level.TRANSIENT: Response(FaultAction.RETRY, True),  # one failed pull, a lone suspicion
        Level.PROCESS: Response(FaultAction.RESTART_PROCESS, False),  # an engine that hangs
        # restarts that do not help, a device that needs a reset
        Level.INSTANCE: Response(FaultAction.REPLACE_INSTANCE, True),
        Level.NODE: Response(FaultAction.DRAIN_NODE, True),  # no spare memory rows left, a dead fan
        Level.LOST: Response(FaultAction.EJECT_NODE, False),  # a device that fell off the bus
    }
)

# An instance with a fault of this level or a worse one gets no requests, unless the ejection is
# held back.
EJECTS_FROM: Final = Level.PROCESS


def level_of(number: int) -> Level:
    """The level for a number that another process sent.

    A number above the worst level gives the worst level.
    """
    return Level(min(max(number, Level.WELL), Level.LOST))


def must_restart(level: int, held_back: str) -> bool:
    """Whether an instance with a fault of this level must end itself.

    `held_back` has the meaning of `FaultJudged.held_back`.
    """
    action = RESPONSES[level_of(level)].action
    return not held_back and action is FaultAction.RESTART_PROCESS


@dataclass(frozen=True, slots=True)
class FaultJudged:
    """The health-monitor's judgement of one incarnation, one life of an instance.

    `held_back` says why the action is not carried out. If it is empty, the action is carried out.
    """

    instance_id: str
    incarnation: int
    level: Level
    reasons: tuple[str, ...] = ()
    held_back: str = ""
    since: float = 0.0  # unix seconds, by the health-monitor's clock

    def __str__(self) -> str:
        return f"fault level {self.level:d}: {', '.join(self.reasons)}"

    @property
    def ejects(self) -> bool:
        """Whether the instance gets no requests because of this judgement."""
        return self.level >= EJECTS_FROM and not self.held_back
