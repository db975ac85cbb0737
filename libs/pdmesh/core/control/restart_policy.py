"""Decides when a supervisor starts a process again after the process died.

The first restart is immediate. Later restarts wait longer each time, up to a limit. If a process
was ready for a while before it died, that death counts as the first again. For this, a process that
never became ready must have run much longer: loading a model takes minutes, and may fail at the end
each time.

A process that keeps dying is given up, and its last exit code is reported. Exit code 2 means that a
setting is invalid, or that no engine accepts it. Such a process is given up at once, because a
restart cannot help.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from pdmesh.core.flight_recorder import FlightRecorder, recorded
from pdmesh.core.model import Tick

BAD_SETTING: Final = 2
# If one process dies this often during the start of a whole mesh, the start has failed.
DEATHS_WHILE_STARTING: Final = 3


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Delays are in seconds. Successive restarts wait 0, base, 2*base, ... up to max."""

    base_delay_s: float = 0.25
    max_delay_s: float = 5.0
    stable_after_s: float = 10.0  # if ready for this long, the next death counts as the first
    # If a process that was never ready has run for this long, its death counts as the first. Such a
    # process may be a gateway whose instances are all blank, that is, without a role.
    stable_unready_after_s: float = 600.0
    max_deaths: int = 10  # after this many deaths in a row, the process is given up

    def delay_s(self, deaths: int) -> float:
        """The delay before the restart after the `deaths`-th death in a row (1 is the first)."""
        if deaths <= 1:
            return 0.0
        return min(self.max_delay_s, self.base_delay_s * 2.0 ** min(deaths - 2, 30))


class ProcessPhase(Enum):
    STOPPED = "stopped"
    RUNNING = "running"
    WAITING = "waiting"  # for its next start
    STOPPING = "stopping"
    FAILED = "failed"  # given up


@dataclass(frozen=True, slots=True)
class StartAsked:
    name: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    name: str


@dataclass(frozen=True, slots=True)
class Exited:
    """The process ended. `code` is its exit code, or negative if a signal ended it."""

    name: str
    code: int


@dataclass(frozen=True, slots=True)
class BecameReady:
    """The present run of the process reports that it is ready."""

    name: str


Event = StartAsked | StopAsked | Exited | BecameReady | Tick


@dataclass(frozen=True, slots=True)
class StartProcess:
    name: str


@dataclass(frozen=True, slots=True)
class SignalStop:
    """Ask the process to end, and kill it after its grace time."""

    name: str


@dataclass(frozen=True, slots=True)
class RestartScheduled:
    name: str
    code: int
    deaths: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    name: str
    code: int
    deaths: int


Effect = StartProcess | SignalStop | RestartScheduled | GiveUp


@dataclass(slots=True)
class _Child:
    phase: ProcessPhase = ProcessPhase.STOPPED
    deaths: int = 0
    started_at: float = 0.0
    ready_at: float | None = None  # None: the present run was not ready yet
    start_at: float = 0.0


@dataclass(slots=True)
class Supervision:
    """The state of each supervised process. Only `handle` changes it."""

    policy: RestartPolicy = field(default_factory=RestartPolicy)
    _children: dict[str, _Child] = field(default_factory=dict)
    recorder: FlightRecorder = field(default_factory=FlightRecorder, repr=False, compare=False)

    @recorded
    def handle(self, event: Event, now: float) -> Sequence[Effect]:
        match event:
            case StartAsked(name):
                return self._on_start_asked(name, now)
            case StopAsked(name):
                return self._on_stop_asked(name)
            case Exited(name, code):
                return self._on_exited(name, code, now)
            case BecameReady(name):
                return self._on_ready(name, now)
            case Tick():
                return self._on_tick(now)

    def phase(self, name: str) -> ProcessPhase:
        child = self._children.get(name)
        return child.phase if child else ProcessPhase.STOPPED

    def deaths(self, name: str) -> int:
        """How many times in a row the process has died."""
        child = self._children.get(name)
        return child.deaths if child else 0

    def is_ready(self, name: str) -> bool:
        """Whether the present run of the process was ever ready."""
        child = self._children.get(name)
        return child is not None and child.ready_at is not None

    def next_start_at(self) -> float | None:
        """When a waiting process is next to be started by a `Tick`. None means that no process
        waits.
        """
        waiting = [c.start_at for c in self._children.values() if c.phase is ProcessPhase.WAITING]
        return min(waiting, default=None)

    def _on_start_asked(self, name: str, now: float) -> list[Effect]:
        child = self._children.setdefault(name, _Child())
        if child.phase in (ProcessPhase.RUNNING, ProcessPhase.STOPPING):
            return []
        child.deaths = 0
        return [self._start(name, child, now)]

    def _on_stop_asked(self, name: str) -> list[Effect]:
        child = self._children.get(name)
        if child is None or child.phase is ProcessPhase.STOPPING:
            return []
        if child.phase is ProcessPhase.RUNNING:
            child.phase = ProcessPhase.STOPPING
            return [SignalStop(name)]
        child.phase = ProcessPhase.STOPPED
        return []

    def _on_exited(self, name: str, code: int, now: float) -> list[Effect]:
        child = self._children.get(name)
        if child is None or child.phase not in (ProcessPhase.RUNNING, ProcessPhase.STOPPING):
            return []
        if child.phase is ProcessPhase.STOPPING:
            child.phase = ProcessPhase.STOPPED
            return []
        child.deaths = 1 if self._was_stable(child, now) else child.deaths + 1
        if code == BAD_SETTING or child.deaths >= self.policy.max_deaths:
            child.phase = ProcessPhase.FAILED
            return [GiveUp(name, code, child.deaths)]
        delay_s = self.policy.delay_s(child.deaths)
        child.phase, child.start_at = ProcessPhase.WAITING, now + delay_s
        scheduled = RestartScheduled(name, code, child.deaths, delay_s)
        return [scheduled] if delay_s else [scheduled, self._start(name, child, now)]

    def _on_ready(self, name: str, now: float) -> list[Effect]:
        child = self._children.get(name)
        if child is not None and child.phase is ProcessPhase.RUNNING and child.ready_at is None:
            child.ready_at = now
        return []

    def _was_stable(self, child: _Child, now: float) -> bool:
        if child.ready_at is None:
            return now - child.started_at >= self.policy.stable_unready_after_s
        return now - child.ready_at >= self.policy.stable_after_s

    def _on_tick(self, now: float) -> list[Effect]:
        due = [
            (name, child)
            for name, child in self._children.items()
            if child.phase is ProcessPhase.WAITING and child.start_at <= now
        ]
        return [self._start(name, child, now) for name, child in due]

    def _start(self, name: str, child: _Child, now: float) -> StartProcess:
        child.phase, child.started_at, child.ready_at = ProcessPhase.RUNNING, now, None
        return StartProcess(name)
