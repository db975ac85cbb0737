"""Computes the time per token of decodes, whose sequences share the steps of their engines.

The number of running sequences is computed as in a processor-sharing queue whose speed depends on
the batch. This number depends on the mean of the lengths, but not on their distribution. The master
spreads sequences evenly, so each engine of the pool runs an equal part of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdmesh.core.instance.step_time_law import Law
from pdmesh.core.sizing.queueing import above, quantile_of
from pdmesh.core.sizing.traffic import RequestLengths, Traffic, mean

# The queue has fewer than twice this many states. If the pool can run more sequences, each state
# stands for a range of sequence counts.
_MAX_STATES: Final = 300


@dataclass(frozen=True, slots=True)
class Contexts:
    """How many tokens a running sequence holds, over the time that it runs."""

    mean: float
    variance: float
    reserved: float  # the tokens reserved for its prompt and whole answer, in whole blocks


def contexts(requests: Sequence[RequestLengths], block: int) -> Contexts:
    steps = sum(r.num_steps for r in requests)
    if not steps:
        return Contexts(0.0, 0.0, float(block))
    held = [(r.num_steps, r.num_prompt + r.num_output / 2) for r in requests]
    middle = sum(n * c for n, c in held) / steps
    square = sum(n * (c * c + n * n / 12) for n, c in held) / steps
    reserved = sum(
        r.num_steps * math.ceil((r.num_prompt + r.num_output + 1) / block) * block for r in requests
    )
    return Contexts(middle, square - middle**2, reserved / steps)


@dataclass(frozen=True, slots=True)
class BatchLoad:
    """How many sequences one engine runs, as mean and variance.

    `full` is the share of requests that find no room in any engine.
    """

    mean: float
    variance: float
    full: float


def running(
    rate_per_s: float, steps: float, step_s: list[float], num_engines: int, most: int
) -> BatchLoad:
    """The load of each of `num_engines` engines.

    `steps` is the mean number of decode steps of a request. `step_s[n]` is the time of a step with
    n sequences, in seconds, for n from 0 to `most`.
    """
    offered = rate_per_s * steps
    total = num_engines * most
    stride = max(1, total // _MAX_STATES)
    logs, numbers = [0.0], [0]
    for n in range(stride, total + 1, stride):
        at = n - (stride - 1) / 2
        logs.append(logs[-1] + stride * math.log(offered * _between(step_s, at / num_engines) / at))
        numbers.append(n)
    highest = max(logs)
    weights = [math.exp(each - highest) for each in logs]
    # Beyond the last state, all engines are full and requests wait.
    ratio = offered * step_s[most] / total
    if ratio >= 1:
        return BatchLoad(most, 0.0, 1.0)
    waiting = weights[-1] * ratio / (1 - ratio) / stride
    whole = sum(weights) + waiting
    middle = (sum(n * w for n, w in zip(numbers, weights, strict=True)) + total * waiting) / whole
    square = sum(n * n * w for n, w in zip(numbers, weights, strict=True)) + total**2 * waiting
    full = (waiting + weights[-1] / stride) / whole
    variance = max(0.0, square / whole - middle**2)
    return BatchLoad(middle / num_engines, variance / num_engines**2, full)


def _between(values: list[float], at: float) -> float:
    low = min(int(at), len(values) - 1)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)


@dataclass(frozen=True, slots=True)
class NextTokens:
    """The time per token, after the first token.

    Three tuples have one value for each sampled request. `deviations` and `skews` have the standard
    deviation and the skewness of the request's time per token. A request may be delayed at the
    beginning of its answer. `extra_s` has this delay, divided by the number of the answer's tokens.
    No request has a mean time per token above `slowest_s`.
    """

    mean_s: float
    deviations: tuple[float, ...]
    skews: tuple[float, ...]
    extra_s: tuple[float, ...]
    batch: float
    full: float
    most: int
    slowest_s: float = math.inf

    def exceeds(self, seconds: float) -> float:
        """The share of requests whose time per token is longer than `seconds`.

        Requests that find no room are included.
        """
        slow = mean(
            [
                above(self.mean_s + extra, deviation, seconds, skew)
                if seconds < self.slowest_s
                else 0.0
                for extra, deviation, skew in zip(
                    self.extra_s, self.deviations, self.skews, strict=True
                )
            ]
        )
        return self.full + (1 - self.full) * slow

    def quantile_s(self, share: float) -> float:
        return quantile_of(self.exceeds, share, self.mean_s)


def next_tokens(
    law: Law,
    traffic: Traffic,
    num_instances: int,
    most: int,
    held: Contexts,
    before_s: Sequence[float],
) -> NextTokens:
    """The time per token of `num_instances` decodes.

    `before_s` has, for each sampled request, the time from its first token to its first decode
    step.
    """
    requests = traffic.requests
    steps = mean([r.num_steps for r in requests])
    if most < 1 or not steps:
        return no_tokens(most, steps)
    step_s = [law.step_s(max(n, 1), max(n, 1) * held.mean) for n in range(most + 1)]
    found = running(traffic.rate_per_s, steps, step_s, num_instances, most)
    middle = found.mean * num_instances / (traffic.rate_per_s * steps)  # Little's law
    slope = law.step_sequence_s + law.step_context_s * held.mean
    variance = found.variance * slope**2
    variance += found.mean * held.variance * law.step_context_s**2
    smooth = [math.sqrt(variance * averaged(r.num_steps / steps)) for r in requests]
    extra = [b / max(r.num_steps, 1) for b, r in zip(before_s, requests, strict=True)]
    skews = tuple(0.0 for _ in requests)
    return NextTokens(middle, tuple(smooth), skews, tuple(extra), found.mean, found.full, most)


def no_tokens(most: int, steps: float) -> NextTokens:
    """The result for engines without room for a sequence, or for requests without decode steps."""
    return NextTokens(0.0, (0.0,), (0.0,), (0.0,), 0.0, float(most < 1 and steps > 0), most)


def averaged(lives: float) -> float:
    """The variance of the batch size averaged over a period, over its variance at one moment.

    The period is `lives` times the mean duration of a request.
    """
    if lives < 1e-3:
        return 1.0
    return 2 * (lives - 1 + math.exp(-lives)) / lives**2
