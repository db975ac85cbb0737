"""Counts the answers of each scenario in the last hour, and their times, in steps of 15 s.

A scenario is a kind of requests with its own goals. The goodput, `num_answered`, counts the
requests that were answered completely. A request that finds no prefill within its scenario's TTFT_S
fails, so it is no goodput.
The times to first token (TTFT) are counted in bins, each 10 % wider than the one before. So a
quantile is at most 5 % off.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.history.ended_request import EndedRequest

STEP_S: Final = 15.0
NUM_STEPS: Final = 240
MAX_SCENARIOS: Final = 64
_BIN: Final = math.log(1.1)


@dataclass(slots=True)
class HistoryStep:
    num_answered: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_tokens: int = 0
    _ttfts: Counter[int] = field(default_factory=Counter)

    def add(self, request: EndedRequest) -> None:
        self.num_tokens += request.num_completion_tokens
        if request.outcome == "completed":
            self.num_answered += 1
            if request.ttft_ms > 0:
                self._ttfts[round(math.log(request.ttft_ms) / _BIN)] += 1
        elif request.outcome == "cancelled":
            self.num_cancelled += 1
        elif not request.is_by_client:
            self.num_failed += 1

    def ttft_ms(self, share: float) -> float:
        """The TTFT that this share of the answered requests did not exceed. 0 means that no request
        was answered.
        """
        left = math.ceil(share * self._ttfts.total())
        for number, count in sorted(self._ttfts.items()):
            left -= count
            if left <= 0:
                return math.exp(number * _BIN)
        return 0.0


@dataclass(slots=True)
class AnswerHistory:
    """The steps of each scenario.

    `now` is in seconds of any one clock. At the bound, the scenario without requests for the
    longest time is dropped.
    """

    _steps: OrderedDict[str, deque[tuple[int, HistoryStep]]] = field(default_factory=OrderedDict)

    def handle(self, request: EndedRequest, now: float, *, is_served: bool = True) -> None:
        """Add a request to its scenario's present step.

        `is_served` is false if no instance serves the scenario. Such a request counts only if the
        scenario has a history, because clients may invent names.
        """
        if request.scenario not in self._steps and not is_served:
            return
        steps = self._steps.setdefault(request.scenario, deque(maxlen=NUM_STEPS + 1))
        self._steps.move_to_end(request.scenario)
        if len(self._steps) > MAX_SCENARIOS:
            self._steps.popitem(last=False)
        number = int(now // STEP_S)
        if not steps or steps[-1][0] < number:
            steps.append((number, HistoryStep()))
        steps[-1][1].add(request)

    def steps(self, now: float) -> dict[str, list[HistoryStep]]:
        """The last complete steps of each scenario, the latest one last. The present step is left
        out.
        """
        current = int(now // STEP_S)
        found = {}
        for scenario, steps in sorted(self._steps.items()):
            known = dict(steps)
            wanted = range(current - NUM_STEPS, current)
            if known and max(known) >= wanted[0]:
                found[scenario] = [known.get(number) or HistoryStep() for number in wanted]
        return found
