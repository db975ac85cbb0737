"""Sums up how an engine's steps spend their time, and whether scheduling delays them (S139, S140).

A step is scheduled, computed and processed. Processing reads the step's tokens and ends requests.
With synchronous scheduling, the device waits while a step is scheduled or processed. With
asynchronous scheduling, step n + 1, and no later step, is scheduled while step n is computed.

Steps that compute nothing are not counted. A step is steady if no request begins in it, and if no
request has ended since the step before. A wait of the device before a steady step is a sign of slow
scheduling. Before other steps, it is not.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Final

_MOST_PENDING: Final = 64  # scheduled steps that `computed` has not reported; normally few


@dataclass(slots=True)
class StepTotals:
    """Sums over all steps since the start."""

    num_steps: int = 0  # computed steps
    schedule_s: float = 0.0
    compute_s: float = 0.0
    process_s: float = 0.0
    num_steady: int = 0
    num_overlapped: int = 0  # steady steps that were scheduled while the step before was computed
    gap_s: float = 0.0  # time before steady steps in which nothing was computed
    most_ahead: int = 0  # the most steps that were not processed yet when one was scheduled
    num_tokens_past_end: int = 0  # tokens computed for requests that had ended

    def numbers(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Scheduled:
    begin: float
    end: float
    is_steady: bool


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """One step. The device computed for `busy_s` of the time from `begin` to `end`."""

    begin: float
    end: float
    busy_s: float


@dataclass(slots=True)
class StepTimes:
    """Call each method once per step, in the order of the steps. All times are of one clock."""

    totals: StepTotals = field(default_factory=StepTotals)
    _pending: list[_Scheduled] = field(default_factory=list)  # scheduled, but not yet computed
    _last: ComputedStep | None = None
    _num_in_flight: int = 0

    def scheduled(self, begin: float, end: float, *, is_steady: bool) -> None:
        self.totals.schedule_s += end - begin
        self.totals.most_ahead = max(self.totals.most_ahead, self._num_in_flight)
        self._num_in_flight += 1
        self._pending.append(_Scheduled(begin, end, is_steady))
        del self._pending[:-_MOST_PENDING]

    def computed(self, step: ComputedStep) -> None:
        totals, last = self.totals, self._last
        totals.num_steps += 1
        totals.compute_s += step.busy_s
        self._last = step
        scheduled = self._pending.pop(0) if self._pending else None
        if scheduled is None or last is None or not scheduled.is_steady:
            return
        totals.num_steady += 1
        totals.num_overlapped += last.begin <= scheduled.begin and scheduled.end <= last.end
        totals.gap_s += max(0.0, step.begin - last.begin - last.busy_s)

    def processed(self, begin: float, end: float) -> None:
        self._num_in_flight -= 1
        assert self._num_in_flight >= 0, "a step is processed once, after it was scheduled"
        self.totals.process_s += end - begin
