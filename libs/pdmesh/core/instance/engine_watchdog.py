"""Decides whether the engine still runs.

Without this watch, an instance whose process lives while its engine hangs would take requests and
answer none. One ping at a time goes through the engine's own loop, whether the engine has work or
not. It is answered between two steps. Within a step the engine shows that it computes, layer by
layer. An engine that has neither answered nor shown work for `slow_s` is suspect. After `hung_s` it
is given up: its instance ends itself and is started anew. How long a step takes does not matter. If
this process itself was paused, the wait begins anew.
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
    """The ping came back."""


@dataclass(frozen=True, slots=True)
class WorkSeen:
    """The engine computed something since the last tick."""


@dataclass(frozen=True, slots=True)
class SendPing:
    pass


@dataclass(frozen=True, slots=True)
class DeclareHung:
    """The engine hangs."""

    silent_s: float


Event = PingAnswered | WorkSeen | Tick
Effect = SendPing | DeclareHung


@dataclass(slots=True)
class EngineWatchdog:
    """The only way to change state is `handle`.

    Times in seconds; `slow_s` is longer than a layer takes.
    """

    slow_s: float
    hung_s: float
    _silent_since: float | None = None  # None: no ping is open
    _ticked_at: float | None = None
    recorder: FlightRecorder = field(default_factory=FlightRecorder, repr=False, compare=False)

    @property
    def period_s(self) -> float:
        """Between two ticks."""
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
        """How long a ping has been out without an answer or a sign of work."""
        return 0.0 if self._silent_since is None else max(0.0, now - self._silent_since)

    def signal(self, now: float) -> Signal | None:
        """What the instance reports against itself: a suspicion, then a proof."""
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
            if lost_s > self.slow_s:  # this process was paused, and perhaps its engine, too
                self._silent_since = now
