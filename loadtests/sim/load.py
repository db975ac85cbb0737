"""Makes requests for a simulated mesh, at a rate and with lengths that change over time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from loadtests.traffic.workloads import Arrival


@dataclass(frozen=True, slots=True)
class Lengths:
    """The mean numbers of tokens per request.

    Single requests differ from the mean by up to the share `spread`, uniformly.
    """

    num_prompt: int
    num_output: int
    spread: float = 0.3

    def draw(self, rng: random.Random) -> tuple[int, int]:
        def one(mean: int) -> int:
            return max(2, round(mean * rng.uniform(1 - self.spread, 1 + self.spread)))

        return one(self.num_prompt), one(self.num_output)


def poisson(
    rng: random.Random,
    until: float,
    peak_per_s: float,
    rate_at: Callable[[float], float],
    lengths_at: Callable[[float], Lengths],
    scenario: str = "default",
) -> Iterator[Arrival]:
    """Arrivals before `until`, at `rate_at(t)` requests/s.

    The rate must not exceed `peak_per_s`.
    """
    now = 0.0
    while (now := now + rng.expovariate(peak_per_s)) < until:
        if rng.random() * peak_per_s < rate_at(now):
            num_prompt, num_output = lengths_at(now).draw(rng)
            yield Arrival(now, num_prompt, num_output, (), scenario)


def merged(*streams: Iterator[Arrival]) -> Iterator[Arrival]:
    """The arrivals of several scenarios in the order of their times."""
    heads = [(arrival, stream) for stream in streams if (arrival := next(stream, None)) is not None]
    while heads:
        arrival, stream = min(heads, key=lambda head: head[0].at_s)
        heads.remove((arrival, stream))
        yield arrival
        if (following := next(stream, None)) is not None:
            heads.append((following, stream))
