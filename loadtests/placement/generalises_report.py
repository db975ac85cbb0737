"""Makes the tables of `loadtests.placement.generalises`, by family and over all families."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from loadtests.harness.results import Spread
from loadtests.harness.verdicts import OURS, Measure, verdicts
from pdmesh.core.placement.expected_completion import Prices


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of one run.

    `busiest` is the number of prompts on the busiest prefilling instance, divided by the mean.
    `home_percent` is the share of turns, after a session's first, that were served where the
    session's last turn was.
    """

    family: str
    policy: str
    seed: int
    reuse_percent: float
    ttft_ms_mean: float
    ttft_ms_p95: float
    ttft_ms_p99: float
    busiest: float
    home_percent: float
    prediction_error_percent: float
    wait_error_percent: float


MEASURES: Final[tuple[Measure[Outcome], ...]] = (
    Measure("reuse, %", lambda o: o.reuse_percent, ".1f", is_more_better=True),
    Measure("TTFT mean, ms", lambda o: o.ttft_ms_mean, ".0f"),
    Measure("TTFT p95, ms", lambda o: o.ttft_ms_p95, ".0f"),
    Measure("TTFT p99, ms", lambda o: o.ttft_ms_p99, ".0f"),
    Measure("busiest/mean", lambda o: o.busiest, ".2f"),
)
JUDGED: Final = MEASURES[:4]


def badness(runs: Sequence[Outcome]) -> float:
    """One number for the runs of a family: the product of the measures that should be low, divided
    by reuse.

    Only ratios of such numbers mean something.
    """
    mean = {m.name: max(1e-6, m.of(runs).median) for m in MEASURES}
    reuse = mean.pop("reuse, %")
    return math.prod(mean.values()) / max(1.0, reuse)


def chosen_without(tried: Mapping[Prices, Mapping[str, float]], left_out: str) -> Prices:
    """The constants that are best on all families except `left_out`.

    `tried` has the badness of each choice of constants, by family.
    """

    def on_others(prices: Prices) -> float:
        return sum(math.log(bad) for name, bad in tried[prices].items() if name != left_out)

    return min(tried, key=on_others)


def dominated_by(by_policy: Mapping[str, Sequence[Outcome]]) -> list[str]:
    """The policies that are at least as good as ours in every judged measure, and better in one."""
    ours = [m.of(by_policy[OURS]).median for m in JUDGED]
    found = []
    for policy, runs in by_policy.items():
        theirs = [m.of(runs).median for m in JUDGED]
        pairs = list(zip(JUDGED, theirs, ours, strict=True))
        is_as_good = not any(m.is_better(our, their) for m, their, our in pairs)
        if is_as_good and any(m.is_better(their, our) for m, their, our in pairs):
            found.append(policy)
    return found


def family_table(
    name: str, by_policy: Mapping[str, Sequence[Outcome]], prices: Prices, seeds: int
) -> str:
    lines = [
        f"\n### {name}\n",
        (
            f"Judged with future {prices.future:g} and balance {prices.balance:g}, chosen on the "
            f"other families ({seeds} seeds).\n"
        ),
        (
            "| policy | reuse % | TTFT mean ms | p95 | p99 | busiest/mean | turns at home % "
            "| error % |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for policy, runs in by_policy.items():
        cells = [m.of(runs).text(m.form) for m in MEASURES]
        cells.append(Spread.of([o.home_percent for o in runs]).text(".0f"))
        cells.append(Spread.of([o.prediction_error_percent for o in runs]).text(".1f"))
        lines.append(f"| {policy} | {' | '.join(cells)} |")
    better = dominated_by(by_policy)
    front = (
        f"Ours is **not on the Pareto front**: {', '.join(better)}."
        if better
        else "Ours is on the Pareto front."
    )
    return "\n".join([*lines, "", verdicts(by_policy, JUDGED), f"- {front}"])


def summary(judged: Mapping[str, Mapping[str, Sequence[Outcome]]]) -> str:
    """A table of ours against each other policy: geometric means of the ratios over all
    families.
    """
    lines = [
        "\n## All families\n",
        (
            "Theirs over ours, geometric mean over the families (reuse: ours over theirs, where "
            "there is any). Above 1, ours is better.\n"
        ),
        "| policy | reuse | TTFT mean | p95 | p99 | dominates ours |",
        "|---|---|---|---|---|---|",
    ]
    policies = [p for p in next(iter(judged.values())) if p != OURS]
    for policy in policies:
        cells = [f"{_ratio(judged, policy, m):.2f}" for m in JUDGED]
        num_dominating = sum(policy in dominated_by(by) for by in judged.values())
        lines.append(f"| {policy} | {' | '.join(cells)} | in {num_dominating} of {len(judged)} |")
    return "\n".join(lines)


def defaults_table(judged: Mapping[str, Mapping[str, Sequence[Outcome]]]) -> str:
    """A table of our policy with the default constants, which were chosen on all families."""
    lines = [
        "\n## With the defaults\n",
        (
            "All families had a part in the choice of the defaults. Busiest/mean and turns at home "
            "are asked of agents: at most 1.3.\n"
        ),
        "| family | reuse % | TTFT mean ms | p95 | p99 | busiest/mean | turns at home % |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, by_policy in judged.items():
        runs = by_policy[OURS]
        cells = [m.of(runs).text(m.form) for m in MEASURES]
        cells.append(Spread.of([o.home_percent for o in runs]).text(".0f"))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, summary(judged).replace("## All families", "### Beside the others")])


def _ratio(
    judged: Mapping[str, Mapping[str, Sequence[Outcome]]], policy: str, measure: Measure[Outcome]
) -> float:
    logs = []
    for by_policy in judged.values():
        ours, theirs = (measure.of(by_policy[p]).median for p in (OURS, policy))
        if ours > 0 and theirs > 0:
            logs.append(math.log(ours / theirs if measure.is_more_better else theirs / ours))
    return math.exp(statistics.fmean(logs)) if logs else math.nan
