"""Measures the cost of one more token in a decode step, as a share of the step's fixed cost (S118).

A step of n tokens takes about `fixed + n * each` seconds. A line that is fitted to the latest steps
gives both numbers. The fit needs steps with different n. These occur when requests begin or end, or
when more or fewer tokens are proposed. Until n has varied enough, the assumed share is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_MEMORY: Final = 1000  # the cost is measured over about this many steps
_LEAST_STEPS: Final = 50
_LEAST_SPREAD: Final = 0.03  # standard deviation of the numbers of tokens, divided by their mean
_LONGEST: Final = 3.0  # a step this many times longer than expected waited for something else
_LEAST, _MOST = 1e-4, 1.0  # a share outside these bounds is noise
_PER_DECADE: Final = 10  # number of values per factor of 10 to which a share is rounded


@dataclass(slots=True)
class TokenCost:
    """The weighted sums over steps from which the cost is computed."""

    assumed: float
    _weight: float = 0.0
    _tokens: float = 0.0
    _seconds: float = 0.0
    _squares: float = 0.0  # squares of the numbers of tokens
    _products: float = 0.0  # tokens times seconds

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Record a step that computed `num_tokens` tokens, none of them of a prompt."""
        if (line := self._line()) is not None:
            fixed, each = line
            seconds = min(seconds, _LONGEST * (fixed + each * num_tokens))
        kept = 1 - 1 / _MEMORY
        self._weight = kept * self._weight + 1
        self._tokens = kept * self._tokens + num_tokens
        self._seconds = kept * self._seconds + seconds
        self._squares = kept * self._squares + num_tokens**2
        self._products = kept * self._products + num_tokens * seconds

    @property
    def share(self) -> float:
        """The measured share, rounded to ten values per factor of 10, or the assumed share.

        The assumed share is returned until the measurement is good enough.
        """
        if (line := self._line()) is None:
            return self.assumed
        fixed, each = line
        share = _MOST if fixed <= each else each / fixed
        return _rounded(max(_LEAST, share))

    def _line(self) -> tuple[float, float] | None:
        """The fixed seconds of a step and the seconds per token, or None if not known yet."""
        if self._weight < _LEAST_STEPS:
            return None
        mean, mean_s = self._tokens / self._weight, self._seconds / self._weight
        variance = self._squares / self._weight - mean**2
        if variance < (_LEAST_SPREAD * mean) ** 2:
            return None
        each = (self._products / self._weight - mean * mean_s) / variance
        each = min(max(each, 0.0), mean_s / mean)
        return mean_s - each * mean, each


def _rounded(share: float) -> float:
    return float(10 ** (round(_PER_DECADE * math.log10(share)) / _PER_DECADE))
