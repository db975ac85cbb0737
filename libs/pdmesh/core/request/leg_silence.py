"""Decides when an accepted leg has fallen silent: neither it nor its engine showed work.

A silent leg waits for its turn while its engine works, however slowly (S33). But its turn must
come. An engine that has computed `max_overtaking` times the work it had open has forgotten this
leg: its work no longer counts as a sign of life.
"""

from __future__ import annotations

import math

from pdmesh.core.request.events import EngineWorked, KvStage, RequestLimits


class LegSilence:
    """The silence of the active leg. `progress_at`: when the leg last made progress of its own."""

    __slots__ = ("_kv_stage", "_limits", "_turn_by", "_turn_of", "_worked_at", "progress_at")

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self.progress_at = 0.0
        self._kv_stage = KvStage.NONE  # of the active leg, if it decodes
        self._worked_at = -math.inf  # when the leg's engine last worked
        self._turn_of = -math.inf  # the `progress_at` for which `_turn_by` was computed
        self._turn_by = 0  # an engine that has computed this many tokens has forgotten the leg

    @property
    def silent_at(self) -> float:
        """When the leg counts as lost, if neither it nor its engine makes progress."""
        return max(self.progress_at, self._worked_at) + self._limits.stall_s

    def began(self, now: float) -> None:
        """A leg was accepted."""
        self.progress_at, self._kv_stage = now, KvStage.NONE

    def kv_advanced(self, stage: KvStage, now: float) -> None:
        """A decode waits for its turn to pull, pulls, then waits for a place in a step.

        Each of these may take almost `stall_s`, and each counts as progress once.
        """
        if stage > self._kv_stage:
            self.progress_at, self._kv_stage = now, stage

    def engine_worked(self, event: EngineWorked) -> None:
        if self._turn_of != self.progress_at:  # the first news since the leg's own last progress
            self._turn_of = self.progress_at
            allowed = self._limits.max_overtaking * event.num_open_tokens
            self._turn_by = event.num_tokens + allowed
        if event.num_tokens <= self._turn_by:
            self._worked_at = event.at

    def engine_unknown(self, now: float) -> None:
        """The instance runs an older release that cannot tell: only the deadline bounds the leg."""
        self._worked_at = now
