"""Computes the throughput of n_p prefills and n_d decodes, and their best split (S2, S30).

A prefill computes b_p prompts at once, each in the time T_p, and a decode runs b_d sequences at
once, each in the time T_d. By P/D-Serve 2.1 and formula (1), the two roles are balanced if
n_p b_p / T_p = n_d b_d / T_d. The throughput per instance is the least of these two rates and of
the arrival rate, divided by n_p + n_d.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phi:
    """The throughput per instance (S2): the least of the three rates, divided by n_p + n_d.

    Rates are in requests/s. inf means that a rate is unknown.
    """

    arriving: float
    prefill: float  # n_p b_p / T_p
    decode: float  # n_d b_d / T_d
    num_instances: int

    @property
    def value(self) -> float:
        least = min(self.arriving, self.prefill, self.decode)
        return least / self.num_instances if self.num_instances else 0.0

    @property
    def bottleneck(self) -> str:
        terms = {"arrivals": self.arriving, "prefill": self.prefill, "decode": self.decode}
        return min(terms, key=terms.__getitem__)


@dataclass(frozen=True, slots=True)
class Split:
    """A split of instances into n_p prefills and n_d decodes."""

    num_prefill: int
    num_decode: int

    @property
    def total(self) -> int:
        return self.num_prefill + self.num_decode

    def __str__(self) -> str:
        return f"{self.num_prefill}:{self.num_decode}"


@dataclass(frozen=True, slots=True)
class Profile:
    """The times of one kind of requests on one kind of instances, in seconds.

    T_p is the time until token 1, with b_p prompts at once. Cached tokens cost no time (r_pre). T_d
    is the time after token 1, with b_d sequences at once. It includes the KV transfer, xi. b / T is
    a capacity only if all b slots were in use when T was measured. At light load, T would be too
    short.
    """

    t_p: float
    b_p: float
    t_d: float
    b_d: float

    @property
    def prefill_per_s(self) -> float:
        """Requests/s of one prefill."""
        return self.b_p / self.t_p

    @property
    def decode_per_s(self) -> float:
        return self.b_d / self.t_d

    def phi(self, split: Split, arriving: float = math.inf) -> Phi:
        return Phi(
            arriving,
            split.num_prefill * self.prefill_per_s,
            split.num_decode * self.decode_per_s,
            split.total,
        )

    def mismatch(self, split: Split) -> float:
        """The higher rate of the two roles divided by the lower one, minus 1.

        It is 0 if the split satisfies formula (1).
        """
        phi = self.phi(split)
        return max(phi.prefill, phi.decode) / min(phi.prefill, phi.decode) - 1

    def best_split(self, total: int, least: int = 1) -> Split:
        """The split of `total` instances with the highest throughput.

        Each role has at least `least` instances. Raises ValueError if `total` is too small.
        """
        return max(splits(total, least), key=lambda s: (self.phi(s).value, -self.mismatch(s)))


def splits(total: int, least: int = 1) -> Iterator[Split]:
    """All splits, the fewest prefills first."""
    if total < 2 * least:
        raise ValueError(f"{total} instances are too few for {least} of each role")
    return (Split(n, total - n) for n in range(least, total - least + 1))
