"""The actions of the nemesis, as plain data. `arena` carries them out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Signal:
    """End the process, which is then started again.

    `armed`: a failpoint for its next incarnation only.
    """

    target: str
    name: Literal["SIGKILL", "SIGTERM"]
    armed: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.target}" + (f", back with {self.armed}" if self.armed else "")


@dataclass(frozen=True, slots=True)
class Freeze:
    """SIGSTOP a process, and SIGCONT it after some seconds: a service, an instance or a server."""

    target: str
    for_s: float

    def __str__(self) -> str:
        return f"freeze {self.target} for {self.for_s} s"


@dataclass(frozen=True, slots=True)
class Outage:
    """Kill nats or valkey, and restart it after some seconds; with `is_wiped`, with an empty
    store.
    """

    target: str
    for_s: float
    is_wiped: bool = False

    def __str__(self) -> str:
        how = "loses all its data" if self.is_wiped else "is down"
        return f"{self.target} {how} for {self.for_s} s"


@dataclass(frozen=True, slots=True)
class Cut:
    """Pass nothing between the process and its server. Connections stay open."""

    target: str
    for_s: float

    def __str__(self) -> str:
        return f"cut {self.target} off for {self.for_s} s"


@dataclass(frozen=True, slots=True)
class Slow:
    """Delay each message between the process and its server."""

    target: str
    delay_s: float
    for_s: float

    def __str__(self) -> str:
        return f"slow {self.target} down by {self.delay_s} s a message for {self.for_s} s"


@dataclass(frozen=True, slots=True)
class DeviceFault:
    """Give the instance's device a fault of this level for some seconds."""

    target: str
    level: int
    for_s: float

    def __str__(self) -> str:
        return f"level {self.level} at the device of {self.target} for {self.for_s} s"


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply another desired state; `shape` describes it."""

    shape: str
    text: str

    def __str__(self) -> str:
        return f"apply {self.shape}"


@dataclass(frozen=True, slots=True)
class Rollback:
    """Roll back to the previous version."""

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
