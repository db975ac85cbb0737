"""Decides from the length of a scenario's queue whether a request may join the queue (S97).

A scenario is a kind of requests with its own instances. Its queue has the requests of all gateways
that wait for a prefill. Each gateway reports to the master how many such requests it has, and the
master adds up these counts. With every plan, the master sends the total, the limit, and the rate at
which the scenario's prefills can begin prompts.

A gateway can therefore refuse a new request before it asks any instance. It refuses the request if
the queue is full, or if the queue ahead takes longer than the request may wait. A gateway calls
waiting requests of one priority and tenant by deadline, so the refused request would most likely
have missed its deadline anyway. Counts older than `MAX_AGE_S` are ignored.
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

Queue = Mapping[int, int]  # how many requests wait, by priority; priority 0 is called first


@dataclass(frozen=True, slots=True)
class Pressure:
    """The queue of one scenario over all gateways.

    If `max_waiting` is 0, there is no limit. If `prefills_per_s` is 0, the rate is unknown.
    """

    scenario: str
    waiting: Queue
    max_waiting: int = 0
    prefills_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class QueueRefusal:
    """`reason` is QUEUE_FULL or TTFT_UNREACHABLE.

    The queue may be short enough after `retry_after_s`.
    """

    reason: str
    retry_after_s: float


@dataclass(slots=True)
class QueueBook:
    """The queues that the gateways have reported to the master.

    If there are too many gateways, the one with the oldest report is forgotten.
    """

    max_age_s: float = MAX_AGE_S
    _told: OrderedDict[str, tuple[float, Mapping[str, Queue]]] = field(default_factory=OrderedDict)

    def tell(self, gateway_id: str, queues: Mapping[str, Queue], now: float) -> None:
        """Record all queues of one gateway, by scenario. They replace the gateway's last report."""
        self._told.pop(gateway_id, None)
        if queues:
            self._told[gateway_id] = (now, dict(list(queues.items())[:MAX_SCENARIOS]))
        while self._told and (
            len(self._told) > _MAX_GATEWAYS or self._oldest_at() < now - self.max_age_s
        ):
            self._told.popitem(last=False)

    def waiting(self, scenario: str, now: float) -> Queue:
        total: dict[int, int] = {}
        for at, queues in list(self._told.values()):  # copied, because other threads call this
            if at >= now - self.max_age_s:
                for priority, count in queues.get(scenario, {}).items():
                    total[priority] = total.get(priority, 0) + count
        return total

    def scenarios(self) -> list[str]:
        """The scenarios in which requests wait or waited lately."""
        return sorted({s for _, queues in list(self._told.values()) for s in queues})

    def _oldest_at(self) -> float:
        return next(iter(self._told.values()))[0]


@dataclass(slots=True)
class Backpressure:
    """Computes the pressure that the master sends to the gateways.

    `prefills_per_s(scenario, now)` returns how many prompts per second the scenario's prefills can
    begin. It returns inf or 0 if that is unknown.
    """

    prefills_per_s: Callable[[str, float], float]
    max_waiting: int = 0
    book: QueueBook = field(default_factory=QueueBook)
    _rates: dict[str, tuple[float, float]] = field(default_factory=dict)  # (since, rate)

    def pressure(self, scenario: str, now: float) -> Pressure:
        waiting = self.book.waiting(scenario, now)
        return Pressure(scenario, waiting, self.max_waiting, self._rate(scenario, now))

    def _rate(self, scenario: str, now: float) -> float:
        """The rate, cached for `_RATE_EVERY_S` because its computation visits all instances."""
        since, rate = self._rates.get(scenario, (-math.inf, 0.0))
        if now - since >= _RATE_EVERY_S:
            found = self.prefills_per_s(scenario, now)
            if not math.isfinite(found):  # do not cache scenarios that clients invent
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
    elsewhere: Queue  # the requests that wait at other gateways


@dataclass(slots=True)
class PressureView:
    """A gateway's copy of the pressures. For its own queue, a gateway uses its own newer count."""

    max_age_s: float = MAX_AGE_S
    _heard: OrderedDict[str, _Heard] = field(default_factory=OrderedDict)

    def hear(self, pressure: Pressure, told: Queue, now: float) -> None:
        """Record a pressure from the master.

        `told` is the part of `pressure.waiting` that the master had from this gateway.
        """
        elsewhere = {p: n - told.get(p, 0) for p, n in pressure.waiting.items()}
        self._heard.pop(pressure.scenario, None)
        self._heard[pressure.scenario] = _Heard(now, pressure, elsewhere)
        while len(self._heard) > MAX_SCENARIOS:
            self._heard.popitem(last=False)

    def refusal(
        self,
        scenario: str,
        own: Queue,
        priority: int,
        ttft_s: float,
        now: float,
        *,
        can_evict: bool = False,
    ) -> QueueRefusal | None:
        """Why a new request should not join the queue, or None if it may join.

        Only requests of the same or a higher priority are ahead of the new request. With
        `can_evict`, the new request is never refused, because it may take the place of a waiting
        request.
        """
        heard = self._heard.get(scenario)
        if can_evict or heard is None or now - heard.at > self.max_age_s:
            return None
        pressure = heard.pressure
        num_before = _up_to(priority, own) + max(0, _up_to(priority, heard.elsewhere))
        rate = pressure.prefills_per_s
        if pressure.max_waiting and num_before >= pressure.max_waiting:
            over = num_before + 1 - pressure.max_waiting
            return QueueRefusal(QUEUE_FULL, over / rate if rate else 1.0)
        # With no request ahead, the new one may get the next free slot, so it is not refused.
        if rate and num_before and num_before / rate > ttft_s:
            return QueueRefusal(TTFT_UNREACHABLE, max(0.0, num_before / rate - ttft_s))
        return None


def _up_to(priority: int, queue: Queue) -> int:
    return sum(count for p, count in queue.items() if p <= priority)
