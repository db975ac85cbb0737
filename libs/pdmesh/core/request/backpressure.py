"""How long a scenario's queue is over all gateways, and who need not join it (S97).

Each gateway tells the master how many of its requests wait for a prefill; the master adds them up and says with every plan how
many wait in all, how many may, and how fast the scenario's prefills begin prompts. With that a gateway refuses a newcomer by
itself, before it asks anybody: at the limit, or if those before it take longer than it may wait. The waiting room is ordered by
deadline, so whom it refuses is whom the deadline would have ended anyway. What was not heard again lately counts for nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

QUEUE_FULL: Final = "QUEUE_FULL"
TTFT_UNREACHABLE: Final = "TTFT_UNREACHABLE"
MAX_AGE_S: Final = 2.5  # a waiting request asks for a new plan at least every 2 s
MAX_SCENARIOS: Final = 256
_MAX_GATEWAYS: Final = 4096
_RATE_EVERY_S: Final = 0.1

Queue = Mapping[int, int]  # how many wait, by priority: 0 is called first


@dataclass(frozen=True, slots=True)
class Pressure:
    """`waiting` at all gateways; `max_waiting` 0: no limit; `prefills_per_s` 0: not known."""

    scenario: str
    waiting: Queue
    max_waiting: int = 0
    prefills_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class QueueRefusal:
    """`reason` is QUEUE_FULL or TTFT_UNREACHABLE; after `retry_after_s` the queue may be short enough."""

    reason: str
    retry_after_s: float


@dataclass(slots=True)
class QueueBook:
    """The master's sum of what the gateways say. Bounded; the gateway that was silent longest is forgotten first."""

    max_age_s: float = MAX_AGE_S
    _told: OrderedDict[str, tuple[float, Mapping[str, Queue]]] = field(default_factory=OrderedDict)

    def tell(self, gateway_id: str, queues: Mapping[str, Queue], now: float) -> None:
        """All queues of one gateway, by scenario."""
        self._told.pop(gateway_id, None)
        if queues:
            self._told[gateway_id] = (now, dict(list(queues.items())[:MAX_SCENARIOS]))
        while self._told and (
            len(self._told) > _MAX_GATEWAYS or self._oldest_at() < now - self.max_age_s
        ):
            self._told.popitem(last=False)

    def waiting(self, scenario: str, now: float) -> Queue:
        total: dict[int, int] = {}
        for at, queues in list(self._told.values()):  # shown by another thread, too
            if at >= now - self.max_age_s:
                for priority, count in queues.get(scenario, {}).items():
                    total[priority] = total.get(priority, 0) + count
        return total

    def scenarios(self) -> list[str]:
        """Those somebody waits in, or did lately."""
        return sorted({s for _, queues in list(self._told.values()) for s in queues})

    def _oldest_at(self) -> float:
        return next(iter(self._told.values()))[0]


@dataclass(slots=True)
class Backpressure:
    """What the master tells. `prefills_per_s(scenario, now)`: what the scenario's prefills can begin; inf or 0: not known."""

    prefills_per_s: Callable[[str, float], float]
    max_waiting: int = 0
    book: QueueBook = field(default_factory=QueueBook)
    _rates: dict[str, tuple[float, float]] = field(default_factory=dict)  # (since, rate)

    def pressure(self, scenario: str, now: float) -> Pressure:
        waiting = self.book.waiting(scenario, now)
        return Pressure(scenario, waiting, self.max_waiting, self._rate(scenario, now))

    def _rate(self, scenario: str, now: float) -> float:
        """A look at all instances: not with every plan."""
        since, rate = self._rates.get(scenario, (-math.inf, 0.0))
        if now - since >= _RATE_EVERY_S:
            found = self.prefills_per_s(scenario, now)
            if not math.isfinite(found):  # clients make such names up: they take no place here
                self._rates.pop(scenario, None)
                return 0.0
            rate = found
            self._rates.pop(scenario, None)
            self._rates[scenario] = (now, rate)
            while len(self._rates) > MAX_SCENARIOS:
                del self._rates[next(iter(self._rates))]
        return rate


@dataclass(frozen=True, slots=True)
class _Heard:
    at: float
    pressure: Pressure
    elsewhere: Queue  # who waits at the other gateways


@dataclass(slots=True)
class PressureView:
    """A gateway's copy. Its own queue it knows better than the master."""

    max_age_s: float = MAX_AGE_S
    _heard: OrderedDict[str, _Heard] = field(default_factory=OrderedDict)

    def hear(self, pressure: Pressure, told: Queue, now: float) -> None:
        """`told`: the own queue as the master knew it when it said this."""
        elsewhere = {p: n - told.get(p, 0) for p, n in pressure.waiting.items()}
        self._heard.pop(pressure.scenario, None)
        self._heard[pressure.scenario] = _Heard(now, pressure, elsewhere)
        while len(self._heard) > MAX_SCENARIOS:
            self._heard.popitem(last=False)

    def refusal(
        self, scenario: str, own: Queue, priority: int, ttft_s: float, now: float
    ) -> QueueRefusal | None:
        """Why a newcomer should not join the queue; None if it may. Those of a lower priority are not before it."""
        heard = self._heard.get(scenario)
        if heard is None or now - heard.at > self.max_age_s:
            return None
        pressure = heard.pressure
        num_before = _up_to(priority, own) + max(0, _up_to(priority, heard.elsewhere))
        rate = pressure.prefills_per_s
        if pressure.max_waiting and num_before >= pressure.max_waiting:
            over = num_before + 1 - pressure.max_waiting
            return QueueRefusal(QUEUE_FULL, over / rate if rate else 1.0)
        # Nobody waits: the next free slot is as near as the next plan.
        if rate and num_before and num_before / rate > ttft_s:
            return QueueRefusal(TTFT_UNREACHABLE, max(0.0, num_before / rate - ttft_s))
        return None


def _up_to(priority: int, queue: Queue) -> int:
    return sum(count for p, count in queue.items() if p <= priority)
