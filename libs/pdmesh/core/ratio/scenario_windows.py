"""Builds windows of each scenario's requests, which the ratio controller judges (S29).

A scenario is a kind of requests. A window has means over the requests that were answered since the
last window ended. Only scenarios with groups have windows, so names that clients invent have none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pdmesh.core.ratio.bottleneck import Window
from pdmesh.core.ratio.scenario_stats import RequestSample


@dataclass(slots=True)
class _Sums:
    num: int = 0
    num_failed: int = 0
    queue_s: float = 0.0
    t_p_s: float = 0.0
    t_d_s: float = 0.0


@dataclass(slots=True)
class ScenarioWindows:
    """The open window of each scenario. Requests count only after `serve` has set the scenarios."""

    _sums: dict[str, _Sums] = field(default_factory=dict)

    def serve(self, scenarios: Iterable[str]) -> None:
        """Set the scenarios that have groups now. The windows of other scenarios are dropped."""
        known = self._sums
        self._sums = {scenario: known.get(scenario) or _Sums() for scenario in scenarios}

    def finished(self, request: RequestSample) -> None:
        if (sums := self._sums.get(request.scenario)) is not None:
            sums.num += 1
            sums.queue_s += request.queue_s
            sums.t_p_s += max(0.0, request.ttft_s - request.queue_s)
            sums.t_d_s += max(0.0, request.e2e_s - request.ttft_s)

    def failed(self, scenario: str) -> None:
        if (sums := self._sums.get(scenario)) is not None:
            sums.num_failed += 1

    def close(
        self,
        scenario: str,
        prefill_busy: float | None,
        decode_busy: float | None,
        span_s: float,
    ) -> Window | None:
        """End the window, which lasted `span_s`.

        Returns None if no request of the scenario was answered, because there are no times to
        report.
        """
        sums = self._sums.get(scenario)
        if sums is None:
            return None
        self._sums[scenario] = _Sums()
        if not sums.num:
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
