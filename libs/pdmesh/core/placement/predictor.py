"""Predicts how long a prefill will take, learnt online for each kind of instance (S93, S107).

An instance computes parts of several prompts in one step. Prompts that share steps are a span, for
which the instance reports one time. The formula for a span is linear in four sums over its prompts:
computed tokens, their square, computed times reused tokens, and fetched tokens. All token numbers
are in thousands. Each step adds a fixed cost and a cost for the sequences that decode in the same
step.

The formula is fitted by recursive least squares with forgetting, so that it adapts when instances
become slower. Residuals beyond a few times the usual error have less weight (Huber), so that a
pause of the machine has little effect. The prompts of a workload may all have one length, so that
some directions of the parameters are never observed. The fit forgets only along observed directions
(Kulhavy's directional forgetting). Otherwise the uncertainty along the other directions would grow
without end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

_SCALE: Final = 1e-3  # in thousands of tokens, all terms have similar sizes
_SIZE: Final = 7
_PRIOR_S_PER_1K: Final = 0.1  # seconds per thousand computed tokens, before any observation
_PRIOR_FETCH_S_PER_1K: Final = 0.03  # 2 ms for a block of 64 tokens from a peer
_LEAST_S_PER_1K: Final = 1e-3  # no instance computes a million tokens a second
_FIRST_UNCERTAINTY: Final = 100.0
_MIN_S: Final = 1e-4
_ERROR_WEIGHT: Final = 0.05
_LEAD_WEIGHT: Final = 0.05
_BESIDE_SCALE: Final = 1e-2  # hundreds of sequences
MAX_KINDS: Final = 256
_FEW_OBSERVED: Final = 4
_MANY_OBSERVED: Final = 20  # after this many observations, unusual ones have less weight
_USUAL_ERRORS: Final = 3.0
_LEAST_UNUSUAL: Final = 0.5


class PromptTokens(NamedTuple):
    """Tokens of one prompt. The KV of `num_fetched` of the reused tokens came from peers."""

    num_tokens: int
    num_reused: int
    num_fetched: int = 0


@dataclass(slots=True)
class PrefillFit:
    """The formula of one kind of instances.

    `error` is the recent mean absolute relative error (MAPE). `lead_share` is the recent number of
    steps per prompt, at most 1.
    """

    forgetting: float = 0.98
    num_observed: int = 0
    error: float = 0.0
    lead_share: float = 1.0
    _theta: list[float] = field(
        default_factory=lambda: [0.0, 0.0, 0.0, _PRIOR_S_PER_1K, 0.0, 0.0, _PRIOR_FETCH_S_PER_1K]
    )
    _p: list[list[float]] = field(
        default_factory=lambda: [
            [_FIRST_UNCERTAINTY * (i == j) for j in range(_SIZE)] for i in range(_SIZE)
        ]
    )

    @property
    def doubt(self) -> float:
        """How much longer than predicted a prompt may take, as a share of the prediction.

        The first predictions are guesses, so the share is at least 1 before enough observations.
        """
        return self.error if self.num_observed >= _FEW_OBSERVED else max(1.0, self.error)

    def predict_s(
        self,
        num_tokens: int,
        num_reused: int,
        *,
        num_fetched: int = 0,
        num_beside: float = 0,
        is_queued: bool = False,
    ) -> float:
        """The seconds that the prompt adds to the work of its instance, at least 0.1 ms.

        `num_beside` sequences decode in the same steps. A queued prompt may share a step with
        earlier prompts, so it adds only `lead_share` of a step.
        """
        step, beside, each, linear, square, cross, fetch = self._theta
        reuse = num_reused * _SCALE
        compute = num_tokens * _SCALE - reuse
        fixed = step
        if num_beside:
            fixed += beside + each * num_beside * _BESIDE_SCALE
        if is_queued:
            fixed *= self.lead_share
        each_1k = linear + square * compute + cross * reuse
        seconds = fixed + max(_LEAST_S_PER_1K, each_1k) * compute
        return max(_MIN_S, seconds + fetch * num_fetched * _SCALE)

    def observe(self, num_tokens: int, num_reused: int, seconds: float) -> float:
        """Learn from a prompt that was computed alone. Returns the prediction's relative error."""
        return self.observe_span((PromptTokens(num_tokens, num_reused),), seconds)

    def observe_span(
        self,
        prompts: Sequence[PromptTokens],
        seconds: float,
        num_steps: int = 1,
        num_beside: float = 0,
    ) -> float:
        """Learn from prompts computed together. Returns the prediction's relative error."""
        x = _features(prompts, num_steps, num_beside)
        predicted = max(_MIN_S, self._of(x))
        error = abs(predicted - seconds) / max(seconds, _MIN_S)
        usual = max(_LEAST_UNUSUAL, _USUAL_ERRORS * self.error)
        self.num_observed += 1
        weight = max(_ERROR_WEIGHT, 1 / self.num_observed)
        self.error += weight * (error - self.error)
        self.lead_share += _LEAD_WEIGHT * (min(1.0, num_steps / len(prompts)) - self.lead_share)
        is_unusual = self.num_observed > _MANY_OBSERVED and error > usual
        trust = usual / error if is_unusual else 1.0
        scale = math.sqrt(seconds * min(2 * seconds, max(seconds / 2, predicted)))
        self._update(x, seconds, trust / max(scale, 1e-3))
        return error

    def span_s(
        self, prompts: Sequence[PromptTokens], num_steps: int = 1, num_beside: float = 0
    ) -> float:
        """The predicted seconds for prompts that are computed together."""
        return max(_MIN_S, self._of(_features(prompts, num_steps, num_beside)))

    def _of(self, x: Sequence[float]) -> float:
        return sum(t * v for t, v in zip(self._theta, x, strict=True))

    def _update(self, x: Sequence[float], seconds: float, weight: float) -> None:
        """Update the fit.

        With weights near 1/time, the relative errors of all prompts matter equally.
        """
        x = tuple(v * weight for v in x)
        p, theta = self._p, self._theta
        px = [sum(row[j] * x[j] for j in range(_SIZE)) for row in p]
        spread = max(1e-12, sum(x[i] * px[i] for i in range(_SIZE)))
        residual = (seconds * weight - sum(theta[i] * x[i] for i in range(_SIZE))) / (1 + spread)
        # Along x the spread settles at (1 - forgetting) / forgetting. Below that value, `learnt` is
        # negative, and the spread grows again.
        learnt = self.forgetting - (1 - self.forgetting) / spread
        shrink = learnt / (1 + learnt * spread)
        for i in range(_SIZE):
            theta[i] += px[i] * residual
            for j in range(i, _SIZE):
                p[i][j] = p[j][i] = p[i][j] - px[i] * px[j] * shrink

    def check_invariants(self) -> None:
        """Check that the variances are not negative and at most twice the initial ones."""
        assert all(-1e-6 <= self._p[i][i] <= 2 * _FIRST_UNCERTAINTY for i in range(_SIZE))
        assert 0.0 < self.lead_share <= 1.0


def _features(
    prompts: Sequence[PromptTokens], num_steps: int, num_beside: float
) -> tuple[float, ...]:
    linear = square = cross = fetched = 0.0
    for prompt in prompts:
        reuse = prompt.num_reused * _SCALE
        compute = prompt.num_tokens * _SCALE - reuse
        linear += compute
        square += compute * compute
        cross += compute * reuse
        fetched += prompt.num_fetched * _SCALE
    beside = num_steps * (num_beside > 0)
    each = num_steps * num_beside * _BESIDE_SCALE
    return (num_steps, beside, each, linear, square, cross, fetched)


@dataclass(slots=True)
class LatencyPredictor:
    """The fits by kind of instance. If there are too many kinds, the oldest one is forgotten."""

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
        """The predicted seconds for a prompt without any reuse, or 0 before enough observations."""
        fit = self.fit(kind)
        return fit.predict_s(num_tokens, 0) if fit.num_observed >= _FEW_OBSERVED else 0.0

    def fits(self) -> Iterator[tuple[str, PrefillFit]]:
        yield from self._fits.items()
