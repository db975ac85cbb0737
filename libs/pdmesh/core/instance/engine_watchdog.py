"""Decides whether the engine still runs.

An engine may hang although its process lives. Without this watchdog, such an instance would take
requests and answer none. The watchdog sends one ping at a time through the engine's own loop,
whether the engine has work or not. The engine answers the ping between two steps. Within a step, it
reports work layer by layer, so a long step is no problem. An engine that has neither answered nor
reported work for `slow_s` is suspect. After `hung_s`, the instance ends itself and is restarted. If
this process itself was paused, the time is counted from the end of the pause.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.flight_recorder import FlightRecorder, recorded
from pdmesh.core.health.fault_judge import Signal
from pdmesh.core.health.fault_levels import Level
from pdmesh.core.model import Tick

_PINGS_PER_SLOW: Final = 4
ENGINE_SLOW, ENGINE_SILENT = "ENGINE_SLOW", "ENGINE_SILENT"


@dataclass(frozen=True, slots=True)
class PingAnswered:
    """The engine has answered the ping."""


@dataclass(frozen=True, slots=True)
class WorkSeen:
    """The engine has computed something since the last tick."""


@dataclass(frozen=True, slots=True)
class SendPing:
    pass


@dataclass(frozen=True, slots=True)
class DeclareHung:
    """The engine hangs. It has been silent for `silent_s`."""

    silent_s: float


Event = PingAnswered | WorkSeen | Tick
Effect = SendPing | DeclareHung


@dataclass(slots=True)
class EngineWatchdog:
    """Watches one engine. Only `handle` changes its state.

    Times are in seconds. `slow_s` must be longer than the computation of a layer takes.
    """

    slow_s: float
    hung_s: float
    _silent_since: float | None = None  # None while no ping waits for its answer
    _ticked_at: float | None = None
    recorder: FlightRecorder = field(default_factory=FlightRecorder, repr=False, compare=False)

    @property
    def period_s(self) -> float:
        """The time between two ticks."""
        return self.slow_s / _PINGS_PER_SLOW

    @recorded
    def handle(self, event: Event, now: float) -> list[Effect]:
        if isinstance(event, PingAnswered):
            self._silent_since = None
            return []
        if isinstance(event, WorkSeen):
            if self._silent_since is not None:
                self._silent_since = now
            return []
        self._forgive_a_pause(now)
        if self._silent_since is None:
            self._silent_since = now
            return [SendPing()]
        silent_s = self.silent_s(now)
        return [DeclareHung(silent_s)] if silent_s >= self.hung_s else []

    def silent_s(self, now: float) -> float:
        """For how long a ping has waited without an answer or a sign of work."""
        return 0.0 if self._silent_since is None else max(0.0, now - self._silent_since)

    def signal(self, now: float) -> Signal | None:
        """The fault of its engine that the instance reports: first a suspicion, later a proof."""
        silent_s = self.silent_s(now)
        if silent_s < self.slow_s:
            return None
        is_proof = silent_s >= self.hung_s
        reason = ENGINE_SILENT if is_proof else ENGINE_SLOW
        return Signal("engine", reason, Level.PROCESS, is_proof, f"no answer for {silent_s:.0f} s")

    def _forgive_a_pause(self, now: float) -> None:
        before, self._ticked_at = self._ticked_at, now
        if before is not None and self._silent_since is not None:
            lost_s = now - before - self.period_s
            if lost_s > self.slow_s:  # this process was paused, and perhaps the engine was as well
                self._silent_since = now
