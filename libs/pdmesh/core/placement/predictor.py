"""Predicts how long a prefill will take, learnt online for each kind of instance (S93, S107).

The formula is linear in [1, n, reuse, compute, compute^2] (thousands of tokens). It is fitted by
recursive least squares with forgetting, so that it follows an instance that grows slower. n is
reuse + compute, and all prompts of a workload may have one length, so some directions are never
excited. The fit forgets only along the directions that it observes (Kulhavy's directional
forgetting); otherwise the uncertainty of the other directions would grow without end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

_SCALE: Final = 1e-3  # thousands of tokens: terms of like size keep the fit well conditioned
_SIZE: Final = 5
_PRIOR_S_PER_1K: Final = 0.1  # seconds for a thousand computed tokens before anything was seen
_FIRST_UNCERTAINTY: Final = 100.0
_MIN_S: Final = 1e-4
_ERROR_WEIGHT: Final = 0.05
MAX_KINDS: Final = 256
_FEW_OBSERVED: Final = 4


@dataclass(slots=True)
class PrefillFit:
    """The formula of one kind. `error` is the recent mean absolute relative error (MAPE)."""

    forgetting: float = 0.98
    num_observed: int = 0
    error: float = 0.0
    _theta: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0, _PRIOR_S_PER_1K, 0.0])
    _p: list[list[float]] = field(
        default_factory=lambda: [
            [_FIRST_UNCERTAINTY * (i == j) for j in range(_SIZE)] for i in range(_SIZE)
        ]
    )

    def predict_s(self, num_tokens: int, num_reused: int) -> float:
        """At least 0.1 ms, for the formula may be below zero where nothing was observed."""
        a, b, c, d, e = self._theta
        n, reuse = num_tokens * _SCALE, num_reused * _SCALE
        compute = n - reuse
        seconds = a + b * n + c * reuse + (d + e * compute) * compute
        return max(_MIN_S, seconds)

    def observe(self, num_tokens: int, num_reused: int, seconds: float) -> float:
        """Learn from one prefill. Returns the relative error of its prediction."""
        error = abs(self.predict_s(num_tokens, num_reused) - seconds) / max(seconds, _MIN_S)
        self.num_observed += 1
        weight = max(_ERROR_WEIGHT, 1 / self.num_observed)
        self.error += weight * (error - self.error)
        n, reuse = num_tokens * _SCALE, num_reused * _SCALE
        compute = n - reuse
        self._update((1.0, n, reuse, compute, compute * compute), seconds)
        return error

    def _update(self, x: tuple[float, ...], seconds: float) -> None:
        """Weight by 1/time, so that relative errors of short and long prompts count alike."""
        weight = 1.0 / max(seconds, 1e-3)
        x = tuple(v * weight for v in x)
        p, theta = self._p, self._theta
        px = [sum(row[j] * x[j] for j in range(_SIZE)) for row in p]
        spread = max(1e-12, sum(x[i] * px[i] for i in range(_SIZE)))
        residual = (seconds * weight - sum(theta[i] * x[i] for i in range(_SIZE))) / (1 + spread)
        # Along x the spread settles at (1 - forgetting) / forgetting. Below that the term turns
        # negative, and the spread grows back.
        learnt = self.forgetting - (1 - self.forgetting) / spread
        shrink = learnt / (1 + learnt * spread)
        for i in range(_SIZE):
            theta[i] += px[i] * residual
            for j in range(i, _SIZE):
                p[i][j] = p[j][i] = p[i][j] - px[i] * px[j] * shrink

    def check_invariants(self) -> None:
        """The covariance stays positive, and no direction becomes less certain than at first."""
        assert all(-1e-6 <= self._p[i][i] <= 2 * _FIRST_UNCERTAINTY for i in range(_SIZE))


@dataclass(slots=True)
class LatencyPredictor:
    """The fits by kind of instance. Bounded: the oldest kind is forgotten first."""

    forgetting: float = 0.98
    _fits: dict[str, PrefillFit] = field(default_factory=dict)

    def fit(self, kind: str) -> PrefillFit:
        found = self._fits.get(kind)
        if found is None:
            if len(self._fits) >= MAX_KINDS:
                del self._fits[next(iter(self._fits))]
            found = self._fits[kind] = PrefillFit(self.forgetting)
        return found

    def whole_s(self, kind: str, num_tokens: int) -> float:
        """How long a prompt takes with nothing reused; 0 while too little was observed."""
        fit = self.fit(kind)
        return fit.predict_s(num_tokens, 0) if fit.num_observed >= _FEW_OBSERVED else 0.0

    def fits(self) -> Iterator[tuple[str, PrefillFit]]:
        yield from self._fits.items()
