"""Windows of each scenario's requests: means over those that ended since the last window was closed, for the ratio to be steered by (S29)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdmesh.core.ratio_detector import Window
from pdmesh.core.scenario_stats import MAX_SCENARIOS, Finished


@dataclass(slots=True)
class _Sums:
    num: int = 0
    num_failed: int = 0
    queue_s: float = 0.0
    t_p_s: float = 0.0
    t_d_s: float = 0.0


@dataclass(slots=True)
class ScenarioWindows:
    """Scenarios beyond the bound are not counted until others are closed."""

    _sums: dict[str, _Sums] = field(default_factory=dict)

    def finished(self, request: Finished) -> None:
        if (sums := self._of(request.scenario)) is not None:
            sums.num += 1
            sums.queue_s += request.queue_s
            sums.t_p_s += max(0.0, request.ttft_s - request.queue_s)
            sums.t_d_s += max(0.0, request.e2e_s - request.ttft_s)

    def failed(self, scenario: str) -> None:
        if (sums := self._of(scenario)) is not None:
            sums.num_failed += 1

    def close(
        self,
        scenario: str,
        prefill_busy: float | None,
        decode_busy: float | None,
        span_s: float,
    ) -> Window | None:
        """`span_s`: how long it was. None if nothing of the scenario was answered: its times are not known then."""
        sums = self._sums.pop(scenario, None)
        if sums is None or not sums.num:
            return None
        num = sums.num
        return Window(
            num,
            sums.queue_s / num,
            sums.t_p_s / num,
            sums.t_d_s / num,
            num / (num + sums.num_failed),
            prefill_busy,
            decode_busy,
            num / span_s,
        )

    def _of(self, scenario: str) -> _Sums | None:
        if scenario not in self._sums and len(self._sums) >= MAX_SCENARIOS:
            return None
        return self._sums.setdefault(scenario, _Sums())
