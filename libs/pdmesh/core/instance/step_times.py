"""Where the time of an engine's steps goes, and whether a step is scheduled in time (S139, S140).

A step is scheduled, computed and processed: its tokens are read, and requests end. With synchronous
scheduling, the computing rank waits while a step is scheduled or processed. With asynchronous
scheduling, step n + 1 is scheduled while step n is computed, and at most one step ahead.

Steps that compute nothing do not count. A step is steady if no request begins in it, and none ended
since the step before. Only between such steps does a waiting rank mean that the engine is slow.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Final

_MOST_PENDING: Final = 64  # scheduled steps that are not yet known to be computed; normally few


@dataclass(slots=True)
class StepTotals:
    """Sums since the start."""

    num_steps: int = 0  # computed steps
    schedule_s: float = 0.0
    compute_s: float = 0.0
    process_s: float = 0.0
    num_steady: int = 0
    num_overlapped: int = 0  # steady steps, scheduled within the computation of the one before
    gap_s: float = 0.0  # time without computation before steady steps
    most_ahead: int = 0  # steps that were not processed when another one was scheduled
    num_tokens_past_end: int = 0  # computed for requests that had ended

    def numbers(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Scheduled:
    begin: float
    end: float
    is_steady: bool


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """One step at the rank, which computed for `busy_s` of the time from `begin` to `end`."""

    begin: float
    end: float
    busy_s: float


@dataclass(slots=True)
class StepTimes:
    """Each method takes the steps one after the other. All times are of one clock."""

    totals: StepTotals = field(default_factory=StepTotals)
    _pending: list[_Scheduled] = field(default_factory=list)  # not computed yet, as far as known
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
