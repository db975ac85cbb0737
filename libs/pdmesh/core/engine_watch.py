"""Does the engine still turn? An instance whose process lives while its engine hangs would take requests and answer none.

A ping goes through the engine's own loop, one at a time, whether it has work or not. An engine that has not answered for
`slow_s` is suspect, after `hung_s` it is given up: its instance ends itself and is started anew, since nobody else can
tell a hang from a long step sooner. If we were paused ourselves the wait begins anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.core.fault_judge import Signal
from pdmesh.core.fault_levels import Level

ENGINE_SLOW, ENGINE_SILENT = "ENGINE_SLOW", "ENGINE_SILENT"


@dataclass(frozen=True, slots=True)
class Answered:
    """The ping came back."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. Sent every `period_s`."""


@dataclass(frozen=True, slots=True)
class SendPing:
    pass


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The engine hangs."""

    silent_s: float


Event = Answered | Tick
Effect = SendPing | GiveUp


@dataclass(slots=True)
class EngineWatch:
    """The only way to change state is `handle`. Times in seconds; `hung_s` is longer than any step takes."""

    period_s: float
    slow_s: float
    hung_s: float
    _asked_at: float | None = None
    _ticked_at: float | None = None

    def handle(self, event: Event, now: float) -> list[Effect]:
        if isinstance(event, Answered):
            self._asked_at = None
            return []
        self._forgive_a_pause(now)
        if self._asked_at is None:
            self._asked_at = now
            return [SendPing()]
        silent_s = self.silent_s(now)
        return [GiveUp(silent_s)] if silent_s >= self.hung_s else []

    def silent_s(self, now: float) -> float:
        """For how long a ping has been out."""
        return 0.0 if self._asked_at is None else max(0.0, now - self._asked_at)

    def signal(self, now: float) -> Signal | None:
        """What the instance holds against itself: a suspicion, then a proof."""
        silent_s = self.silent_s(now)
        if silent_s < self.slow_s:
            return None
        is_proof = silent_s >= self.hung_s
        reason = ENGINE_SILENT if is_proof else ENGINE_SLOW
        return Signal("engine", reason, Level.PROCESS, is_proof, f"no answer for {silent_s:.0f} s")

    def _forgive_a_pause(self, now: float) -> None:
        before, self._ticked_at = self._ticked_at, now
        if before is not None and self._asked_at is not None:
            lost_s = now - before - self.period_s
            if lost_s > self.slow_s:  # we were stopped, and perhaps the engine with us
                self._asked_at = now
