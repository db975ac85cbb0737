"""Decides when an accepted leg counts as lost because neither it nor its engine shows progress.

A leg is a request's stay on one instance. As long as the engine computes other legs, a leg without
progress may be waiting for its turn, however slow the engine is (S33). But an engine may also have
forgotten the leg. So after the engine has computed `max_overtaking` times the work that it had
open, its further work no longer counts as progress of the leg.
"""

from __future__ import annotations

import math

from pdmesh.core.request.events import EngineWorked, KvStage, RequestLimits


class LegSilence:
    """Tracks the progress of the active leg and of its engine.

    `progress_at` is the time at which the leg itself last made progress.
    """

    __slots__ = ("_kv_stage", "_limits", "_turn_by", "_turn_of", "_worked_at", "progress_at")

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self.progress_at = 0.0
        self._kv_stage = KvStage.NONE  # of the active leg, if it decodes
        self._worked_at = -math.inf  # when the leg's engine last worked
        self._turn_of = -math.inf  # the `progress_at` for which `_turn_by` was computed
        self._turn_by = 0  # an engine that has computed more tokens has forgotten the leg

    @property
    def silent_at(self) -> float:
        """The time at which the leg counts as lost, if there is no further progress."""
        return max(self.progress_at, self._worked_at) + self._limits.stall_s

    def began(self, now: float) -> None:
        """Start again for a leg that was just accepted."""
        self.progress_at, self._kv_stage = now, KvStage.NONE

    def kv_advanced(self, stage: KvStage, now: float) -> None:
        """Note that the KV of a decode leg has reached a stage. Each stage counts once.

        A decode waits for its turn to pull, pulls, and then waits for a place in a step. Each of
        these phases may take almost `stall_s`.
        """
        if stage > self._kv_stage:
            self.progress_at, self._kv_stage = now, stage

    def engine_worked(self, event: EngineWorked) -> None:
        if self._turn_of != self.progress_at:  # the first report since the leg's own last progress
            self._turn_of = self.progress_at
            allowed = self._limits.max_overtaking * event.num_open_tokens
            self._turn_by = event.num_tokens + allowed
        if event.num_tokens <= self._turn_by:
            self._worked_at = event.at

    def engine_unknown(self, now: float) -> None:
        """Count this call as work of the engine, whose older release does not report work.

        Only the request's deadline bounds a prefill of such an engine.
        """
        self._worked_at = now
