"""A mergeable histogram of durations.

Its buckets are 1 % wide, so a quantile is off by at most 0.5 %. The size of a histogram depends on
the range of the values, not on their number. So a run of a million gaps takes as much memory as a
run of a hundred. Histograms of several processes can be added.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

_WIDTH: Final = math.log(1.01)
_FLOOR_S: Final = 1e-7  # all shorter durations are recorded as this one


@dataclass(slots=True)
class Histogram:
    """Durations in seconds."""

    buckets: Counter[int] = field(default_factory=Counter)
    longest_s: float = 0.0

    @property
    def count(self) -> int:
        return self.buckets.total()

    def record(self, seconds: float) -> None:
        self.buckets[round(math.log(max(seconds, _FLOOR_S)) / _WIDTH)] += 1
        self.longest_s = max(self.longest_s, seconds)

    def merge(self, other: Histogram) -> None:
        self.buckets.update(other.buckets)
        self.longest_s = max(self.longest_s, other.longest_s)

    def mean(self) -> float:
        """The mean; NaN if the histogram is empty."""
        total = sum(n * math.exp(bucket * _WIDTH) for bucket, n in self.buckets.items())
        return total / self.count if self.count else math.nan

    def quantile(self, q: float) -> float:
        """The duration that a share `q` of all durations does not exceed; NaN if there are none."""
        wanted = q * self.count
        seen = 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= wanted:
                return math.exp(bucket * _WIDTH)
        return math.nan

    def share_between(self, low_s: float, high_s: float) -> float:
        """The share of durations in [low_s, high_s]; 0 if there are none."""
        inside = sum(n for b, n in self.buckets.items() if low_s <= math.exp(b * _WIDTH) <= high_s)
        return inside / self.count if self.count else 0.0

    def to_json(self) -> dict[str, object]:
        return {
            "longest_s": self.longest_s,
            "buckets": {str(b): n for b, n in self.buckets.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Histogram:
        buckets, longest_s = data["buckets"], data["longest_s"]
        assert isinstance(buckets, dict)
        assert isinstance(longest_s, float | int)
        return cls(Counter({int(b): int(n) for b, n in buckets.items()}), float(longest_s))
