"""Computes waits in queues with several servers, and quantiles of waits plus other times.

Erlang's C formula gives the probability of a wait. The correction of Allen and Cunneen gives the
mean wait for general service times. The waits of requests that do wait are assumed to be
exponential.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

from pdmesh.core.sizing.traffic import mean

_NORMAL: Final = NormalDist()
_LITTLE_SKEW: Final = 1e-3
_MOST_SKEW: Final = 4.0  # for a larger skewness, the cube root does not fit a gamma distribution


@dataclass(frozen=True, slots=True)
class QueueWait:
    """The distribution of a wait.

    `probability` is the probability that a request waits. `mean_s` is the mean over the requests
    that wait. It is infinite if the servers are overloaded.
    """

    probability: float
    mean_s: float

    def exceeds(self, seconds: float) -> float:
        """The probability that the wait is longer than `seconds`."""
        if seconds < 0:
            return 1.0
        if math.isinf(self.mean_s):
            return 1.0
        if self.mean_s == 0:
            return 0.0
        return self.probability * math.exp(-seconds / self.mean_s)


def erlang_c(servers: int, busy: float) -> float:
    """The probability that all servers are busy. `busy` is the busy share of their time,
    below 1.
    """
    offered = servers * busy
    blocked = 1.0  # Erlang's B, by its recursion
    for k in range(1, servers + 1):
        blocked = offered * blocked / (k + offered * blocked)
    return blocked / (1 - busy * (1 - blocked))


def waiting(
    servers: int, rate_per_s: float, services: Sequence[float], arrival_cv2: float
) -> QueueWait:
    """The wait before `servers` that serve requests in order.

    `services` is a sample of service times, all with the same probability.
    """
    middle = mean(services)
    busy = rate_per_s * middle / servers
    if busy >= 1:
        return QueueWait(1.0, math.inf)
    if middle == 0:
        return QueueWait(0.0, 0.0)
    service_cv2 = mean([x * x for x in services]) / middle**2 - 1
    spread = (arrival_cv2 + service_cv2) / 2
    return QueueWait(erlang_c(servers, busy), spread * middle / (servers * (1 - busy)))


def above(mean_value: float, deviation: float, limit: float, skewness: float = 0.0) -> float:
    """The probability that a value is above `limit`.

    The value has a normal distribution, or a gamma distribution if it is skewed to the right. The
    gamma's tail is computed with the cube root of Wilson and Hilferty.
    """
    if deviation <= 0:
        return float(mean_value > limit)
    z = (limit - mean_value) / deviation
    if skewness > _LITTLE_SKEW:
        skewness = min(skewness, _MOST_SKEW)
        if skewness * z / 2 + 1 <= 0:  # the limit is below all values of the gamma
            return 1.0
        z = 6 / skewness * ((skewness * z / 2 + 1) ** (1 / 3) - 1) + skewness / 6
    return 1 - _NORMAL.cdf(z)


def quantile_of(exceeds: Callable[[float], float], share: float, start: float) -> float:
    """The least value that at most 1 - `share` of the requests exceed.

    `exceeds` must not increase with its argument.
    """
    high = max(start, 1e-6)
    while exceeds(high) > 1 - share:
        high *= 2
        if high > 1e7:
            return math.inf
    low = 0.0
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        if exceeds(middle) > 1 - share:
            low = middle
        else:
            high = middle
    return high
