"""Compares our placement policy with others, and says in words which is best by each measure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from loadtests.harness.results import Spread

OURS = "default"
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Measure(Generic[R]):
    """A number of a run, which should be high or low. `form` is a format for `format()`."""

    name: str
    read: Callable[[R], float]
    form: str
    is_more_better: bool = False

    def of(self, runs: Sequence[R]) -> Spread:
        return Spread.of([self.read(run) for run in runs])

    def is_better(self, one: float, other: float) -> bool:
        return one > other if self.is_more_better else one < other


def verdicts(
    by_policy: Mapping[str, Sequence[R]],
    measures: Sequence[Measure[R]],
    remark: Callable[[Measure[R], str], str] = lambda measure, rival: "",
) -> str:
    """A line for each measure: our policy and the best other one, by medians over the seeds.

    `remark` may add a text to the line if our policy is not best.
    """
    if OURS not in by_policy or len(by_policy) < 2:
        return ""
    return "\n".join(_verdict(by_policy, measure, remark) for measure in measures)


def _verdict(
    by_policy: Mapping[str, Sequence[R]],
    measure: Measure[R],
    remark: Callable[[Measure[R], str], str],
) -> str:
    spreads = {policy: measure.of(runs) for policy, runs in by_policy.items()}
    ours = spreads.pop(OURS)
    sign = -1 if measure.is_more_better else 1
    rival = min(spreads, key=lambda policy: sign * spreads[policy].median)
    best = spreads[rival]
    numbers = (
        f"{format(ours.median, measure.form)} against {format(best.median, measure.form)} of "
        f"`{rival}`"
    )
    if format(ours.median, measure.form) == format(best.median, measure.form):
        return f"- {measure.name}: equal, {numbers}."
    if measure.is_better(ours.median, best.median):
        return f"- {measure.name}: ours is best, {numbers}."
    if min(len(by_policy[OURS]), len(by_policy[rival])) < 2:
        how = "with one seed"
    elif ours.low > best.high or best.low > ours.high:
        how = "beyond the spread of the seeds"
    else:
        how = "within the spread of the seeds"
    return f"- {measure.name}: **not best**, {numbers}, {how}.{remark(measure, rival)}"
