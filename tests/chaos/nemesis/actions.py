"""The actions of the nemesis (random faults and operator's orders) as plain data.

`arena` carries the actions out on a mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Signal:
    """End a process, which is then started again.

    `armed` is a failpoint for the next incarnation only. A failpoint makes a process fail at a
    named place.
    """

    target: str
    name: Literal["SIGKILL", "SIGTERM"]
    armed: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.target}" + (f", back with {self.armed}" if self.armed else "")


@dataclass(frozen=True, slots=True)
class Freeze:
    """Send SIGSTOP to a service, an instance or a server, and SIGCONT after some seconds."""

    target: str
    for_s: float

    def __str__(self) -> str:
        return f"freeze {self.target} for {self.for_s} s"


@dataclass(frozen=True, slots=True)
class Outage:
    """Kill nats or valkey, and restart it after some seconds. `is_wiped` empties its store."""

    target: str
    for_s: float
    is_wiped: bool = False

    def __str__(self) -> str:
        how = "loses all its data" if self.is_wiped else "is down"
        return f"{self.target} {how} for {self.for_s} s"


@dataclass(frozen=True, slots=True)
class Cut:
    """Pass nothing between a process and its server for some seconds. Connections stay open."""

    target: str
    for_s: float

    def __str__(self) -> str:
        return f"cut {self.target} off for {self.for_s} s"


@dataclass(frozen=True, slots=True)
class Slow:
    """Delay each message between a process and its server for some seconds."""

    target: str
    delay_s: float
    for_s: float

    def __str__(self) -> str:
        return f"slow {self.target} down by {self.delay_s} s a message for {self.for_s} s"


@dataclass(frozen=True, slots=True)
class DeviceFault:
    """Give the device of an instance a fault of this level for some seconds."""

    target: str
    level: int
    for_s: float

    def __str__(self) -> str:
        return f"level {self.level} at the device of {self.target} for {self.for_s} s"


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply another desired state, which `shape` describes."""

    shape: str
    text: str

    def __str__(self) -> str:
        return f"apply {self.shape}"


@dataclass(frozen=True, slots=True)
class Rollback:
    """Roll back to the previous version of the desired state."""

    def __str__(self) -> str:
        return "rollback"


@dataclass(frozen=True, slots=True)
class Cordon:
    target: str
    kind: Literal["drain", "cordon"]

    def __str__(self) -> str:
        return f"{self.kind} {self.target}"


@dataclass(frozen=True, slots=True)
class Uncordon:
    target: str

    def __str__(self) -> str:
        return f"uncordon {self.target}"


Fault = Signal | Freeze | Outage | Cut | Slow | DeviceFault
Order = Apply | Rollback | Cordon | Uncordon
Action = Fault | Order
