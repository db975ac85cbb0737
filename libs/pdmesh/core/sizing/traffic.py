"""The traffic of a planned deployment: the lengths of requests, their rate, and the goals.

The lengths are a sample of requests, all with the same probability. They come from a trace, or are
quantiles of a distribution. A sample keeps details that a mean loses, such as the long prompts that
others wait for.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Final

from pdmesh.core.sizing.problem import SizingProblem

NUM_SAMPLES: Final = 200
BLOCK: Final = 64  # tokens of a KV block, as in the setting BLOCK_SIZE
_MAX_TOKENS: Final = 10**7
_MAX_DIGITS: Final = 18  # Python refuses to parse a number of several thousand digits
_LOGNORMAL_FIELDS: Final = ("mean", "p99")


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """The tokens of one request. `num_cached` tokens of its prompt are in an instance's cache."""

    num_prompt: int
    num_cached: int
    num_output: int

    @property
    def num_new(self) -> int:
        return self.num_prompt - self.num_cached

    @property
    def num_steps(self) -> int:
        """The number of decode steps. Token 1 comes from the prefill."""
        return self.num_output - 1


@dataclass(frozen=True, slots=True)
class Traffic:
    """`arrival_cv2` is the squared coefficient of variation of the times between arrivals.

    It is 1 for Poisson arrivals.
    """

    rate_per_s: float
    requests: tuple[RequestLengths, ...]
    arrival_cv2: float = 1.0

    def at(self, rate_per_s: float) -> Traffic:
        return replace(self, rate_per_s=rate_per_s)

    @property
    def mean_prompt(self) -> float:
        return mean([r.num_prompt for r in self.requests])

    @property
    def mean_output(self) -> float:
        return mean([r.num_output for r in self.requests])

    @property
    def cached_share(self) -> float:
        return sum(r.num_cached for r in self.requests) / sum(r.num_prompt for r in self.requests)

    @property
    def longest(self) -> int:
        return max(r.num_prompt + r.num_output for r in self.requests)


@dataclass(frozen=True, slots=True)
class Goals:
    """The SLO: this share of the requests has its first token and its other tokens in time.

    `ttft_s` bounds the time to first token. `tpot_s` bounds the mean time per token after the
    first.
    """

    ttft_s: float
    tpot_s: float
    share: float = 0.99


def traffic_of(rate_per_s: float, prompt: str, output: str, cached_share: float) -> Traffic:
    """Traffic with lengths of prompts and outputs from texts that `spread` reads."""
    prompts, outputs = spread("prompt", prompt), spread("output", output)
    random.Random(1).shuffle(outputs)  # because long prompts have answers of any length
    return Traffic(
        rate_per_s,
        tuple(
            RequestLengths(p, min(_whole_blocks(p * cached_share), p - 1), o)
            for p, o in zip(prompts, outputs, strict=True)
        ),
    )


def _whole_blocks(num_tokens: float) -> int:
    """How many of these tokens a cache can hold, because it holds only whole blocks."""
    return int(num_tokens) // BLOCK * BLOCK


def spread(field: str, text: str) -> list[int]:
    """A sample of lengths from `800`, `100-4000` (uniform) or `mean=800,p99=4000` (lognormal).

    Raises SizingProblem.
    """
    points = [(i + 0.5) / NUM_SAMPLES for i in range(NUM_SAMPLES)]
    if "=" in text:
        return [_tokens(field, max(1, round(x))) for x in _lognormal(field, text, points)]
    first, has_range, last = text.partition("-")
    low = _number(field, first)
    high = _number(field, last) if has_range else low
    if high < low:
        raise SizingProblem(field, f"{text}: the second number is less than the first")
    return [_tokens(field, round(low + (high - low) * p)) for p in points]


def _lognormal(field: str, text: str, points: Sequence[float]) -> list[float]:
    parts = dict(part.partition("=")[::2] for part in text.split(","))
    if set(parts) != set(_LOGNORMAL_FIELDS):
        raise SizingProblem(field, f"{text!r} is not mean=N,p99=M")
    middle, high = _number(field, parts["mean"]), _number(field, parts["p99"])
    z = NormalDist().inv_cdf(0.99)
    # mean = exp(mu + s^2 / 2) and p99 = exp(mu + z s), so s^2 / 2 - z s + ln(p99 / mean) = 0.
    # `sigma` is the smaller root.
    ratio = math.log(high / middle)
    if ratio <= 0 or z * z < 2 * ratio:
        most = math.floor(10 * math.exp(z * z / 2)) / 10
        raise SizingProblem(field, f"p99 must be more than the mean, and at most {most} times it")
    sigma = z - math.sqrt(z * z - 2 * ratio)
    mu = math.log(middle) - sigma * sigma / 2
    drawn = [math.exp(mu + sigma * NormalDist().inv_cdf(p)) for p in points]
    scale = middle / mean(drawn)  # compensates for the missing tail beyond the last point
    return [x * scale for x in drawn]


def _number(field: str, text: str) -> int:
    if not (text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise SizingProblem(field, f"{text!r} is not a number of tokens, MIN-MAX or mean=N,p99=M")
    return _tokens(field, int(text))


def _tokens(field: str, value: int) -> int:
    if not 1 <= value <= _MAX_TOKENS:
        raise SizingProblem(field, f"{value} tokens: must be 1 to {_MAX_TOKENS}")
    return value


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
