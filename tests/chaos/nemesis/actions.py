"""What the nemesis can do to a mesh. Plain data: `arena` carries it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Signal:
    """The process ends, and is started again.

    `armed`: the failpoint that its next life begins with, once.
    """

    target: str
    name: Literal["SIGKILL", "SIGTERM"]
    armed: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.target}" + (f", back with {self.armed}" if self.armed else "")


@dataclass(frozen=True, slots=True)
class Freeze:
    """SIGSTOP, and SIGCONT after so many seconds. A service, an instance, nats or valkey."""

    target: str
    for_s: float

    def __str__(self) -> str:
        return f"freeze {self.target} for {self.for_s} s"


@dataclass(frozen=True, slots=True)
class Outage:
    """nats or valkey is killed and comes back after so many seconds; `is_wiped`: with an empty
    store.
    """

    target: str
    for_s: float
    is_wiped: bool = False

    def __str__(self) -> str:
        how = "loses all it stored" if self.is_wiped else "is away"
        return f"{self.target} {how} for {self.for_s} s"


@dataclass(frozen=True, slots=True)
class Cut:
    """Nothing passes between the process and its server; connections stay open."""

    target: str
    for_s: float

    def __str__(self) -> str:
        return f"cut {self.target} off for {self.for_s} s"


@dataclass(frozen=True, slots=True)
class Slow:
    """Each message between the process and its server takes so much longer."""

    target: str
    delay_s: float
    for_s: float

    def __str__(self) -> str:
        return f"slow {self.target} down by {self.delay_s} s a message for {self.for_s} s"


@dataclass(frozen=True, slots=True)
class DeviceFault:
    """The instance's device has a fault of this level, and is well again after so many seconds."""

    target: str
    level: int
    for_s: float

    def __str__(self) -> str:
        return f"level {self.level} at the device of {self.target} for {self.for_s} s"


@dataclass(frozen=True, slots=True)
class Apply:
    """Another desired state; `shape` says what is in it."""

    shape: str
    text: str

    def __str__(self) -> str:
        return f"apply {self.shape}"


@dataclass(frozen=True, slots=True)
class Rollback:
    """To the version before."""

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
