"""Writes the page of `loadtests.placement.compare`.

The page has a table for each case, says which policy is best by each measure, and has RTP-LLM's two
ratios (S131).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from loadtests.harness.results import Spread, spread_table
from loadtests.harness.verdicts import OURS, Measure, verdicts

OFF: Final = "mixed_pool"
EVEN_OFF: Final = "round_robin"
_MOST_P95: Final = 0.70  # the bar for our P95 divided by the P95 with scheduling off

ABOUT_OFF: Final = (
    "Scheduling off: RTP-LLM (8.1) describes its baseline only as a mesh without its scheduling, "
    "and the scheduling is a Master that knows caches and load. So in the baseline any prefill "
    "gets any prompt, whatever it holds and however busy it is. That is our "
    f"`{OFF}`, which chooses at random, and S131's baseline. `{EVEN_OFF}` knows as little, but "
    "spreads requests evenly: it is the strongest baseline that fits the description."
)


@dataclass(frozen=True, slots=True)
class Run:
    """The results of one policy under one seed.

    `load_max_over_mean` is the number of prompts that the busiest prefill admitted, divided by the
    mean over all prefills. `mesh_cores` is the CPU of all processes of the mesh. `reused_tokens` is
    the mean over answered prompts. Fields that begin with `twin` are from the same run on the
    virtual clock.
    """

    case: str
    policy: str
    seed: int
    replay: str
    goodput_per_s: float
    within_slo_percent: float
    ttft_ms_mean: float
    ttft_ms_p50: float
    ttft_ms_p95: float
    hit_percent: float
    reused_tokens: float
    num_requests: int
    num_refused: int
    num_failed: int
    load_max_over_mean: float
    mesh_cores: float
    generator_late_ms_max: float
    twin_ttft_ms_mean: float
    twin_ttft_ms_p95: float
    twin_within_slo_percent: float
    twin_hit_percent: float


_COLUMNS: Final[tuple[tuple[str, Callable[[Run], float], str], ...]] = (
    ("goodput/s", lambda r: r.goodput_per_s, ".2f"),
    ("within SLO %", lambda r: r.within_slo_percent, ".1f"),
    ("TTFT mean ms", lambda r: r.ttft_ms_mean, ".0f"),
    ("p50", lambda r: r.ttft_ms_p50, ".0f"),
    ("p95", lambda r: r.ttft_ms_p95, ".0f"),
    ("hit %", lambda r: r.hit_percent, ".1f"),
    ("refused", lambda r: r.num_refused, ".0f"),
    ("failed", lambda r: r.num_failed, ".0f"),
    ("max/mean", lambda r: r.load_max_over_mean, ".2f"),
    ("mesh cores", lambda r: r.mesh_cores, ".2f"),
    ("twin TTFT ms", lambda r: r.twin_ttft_ms_mean, ".0f"),
    ("twin p95", lambda r: r.twin_ttft_ms_p95, ".0f"),
    ("twin SLO %", lambda r: r.twin_within_slo_percent, ".1f"),
    ("twin hit %", lambda r: r.twin_hit_percent, ".1f"),
)

# Measures on the mesh, each with the same measure of the twin.
_JUDGED: Final[tuple[tuple[Measure[Run], Measure[Run]], ...]] = (
    (
        Measure("goodput/s", lambda r: r.goodput_per_s, ".2f", is_more_better=True),
        Measure("within SLO %", lambda r: r.twin_within_slo_percent, ".1f", is_more_better=True),
    ),
    (
        Measure("TTFT p95, ms", lambda r: r.ttft_ms_p95, ".0f"),
        Measure("TTFT p95, ms", lambda r: r.twin_ttft_ms_p95, ".0f"),
    ),
    (
        Measure("TTFT mean, ms", lambda r: r.ttft_ms_mean, ".0f"),
        Measure("TTFT mean, ms", lambda r: r.twin_ttft_ms_mean, ".0f"),
    ),
    (
        Measure("hit rate, %", lambda r: r.hit_percent, ".1f", is_more_better=True),
        Measure("hit rate, %", lambda r: r.twin_hit_percent, ".1f", is_more_better=True),
    ),
)


def page(runs: Sequence[Run], least_reuse: Mapping[str, float]) -> str:
    """The page as Markdown: medians (lowest..highest) over the seeds, case by case.

    `least_reuse` has the cases that are RTP-LLM's workloads, each with the least ratio of reuse
    lengths.
    """
    parts = []
    if any(run.case in least_reuse for run in runs):
        parts.append(ABOUT_OFF)
    for case in dict.fromkeys(r.case for r in runs):
        own = [run for run in runs if run.case == case]
        by_policy: dict[str, list[Run]] = {}
        for run in own:
            by_policy.setdefault(run.policy, []).append(run)
        rows = [((policy, len(each)), each) for policy, each in by_policy.items()]
        parts.append(f"### {case}\n\n`loadtests.traffic.replay {own[0].replay}`")
        parts.append(spread_table(("policy", "seeds"), _COLUMNS, rows))
        lines = [_judged(by_policy)]
        if case in least_reuse:
            lines.append(_against_off(by_policy, least_reuse[case]))
        parts.append("\n".join(line for line in lines if line))
    return "\n\n".join(part for part in parts if part)


def _judged(by_policy: Mapping[str, Sequence[Run]]) -> str:
    twins = {measure.name: twin for measure, twin in _JUDGED}

    def on_the_virtual_clock(measure: Measure[Run], rival: str) -> str:
        twin = twins[measure.name]
        ours, theirs = (twin.of(by_policy[policy]).median for policy in (OURS, rival))
        numbers = f"{format(ours, twin.form)} against {format(theirs, twin.form)} ({twin.name})"
        if twin.is_better(ours, theirs):
            return (
                f" On the virtual clock ours is better, {numbers}, so placement's decisions are "
                "not the cause."
            )
        if twin.is_better(theirs, ours):
            return (
                f" The same holds on the virtual clock, {numbers}: placement's decisions are the "
                "cause."
            )
        return f" On the virtual clock both are equal, {numbers}."

    return verdicts(by_policy, [measure for measure, _ in _JUDGED], on_the_virtual_clock)


def _against_off(by_policy: Mapping[str, Sequence[Run]], least_reuse: float) -> str:
    lines = []
    for off in (OFF, EVEN_OFF):
        pairs = _by_seed(by_policy, off)
        if not pairs:
            continue
        p95 = Spread.of([ours.ttft_ms_p95 / other.ttft_ms_p95 for ours, other in pairs])
        twin = Spread.of([ours.twin_ttft_ms_p95 / other.twin_ttft_ms_p95 for ours, other in pairs])
        line = f"- TTFT p95 of ours over `{off}`: {p95.text('.2f')}, twins {twin.text('.2f')}"
        if off == OFF:
            line += f"; bar {_MOST_P95:.2f}: {_met(p95.median <= _MOST_P95)}"
        lines.append(f"{line}.")
        reuse = Spread.of([ours.reused_tokens / max(1.0, o.reused_tokens) for ours, o in pairs])
        tokens = [
            Spread.of([run.reused_tokens for run in side]).median
            for side in zip(*pairs, strict=True)
        ]
        line = (
            f"- Reuse length: {tokens[0]:.0f} tokens of a prompt against {tokens[1]:.0f} of "
            f"`{off}`, {reuse.text('.1f')} times"
        )
        if off == OFF and least_reuse > 1:
            line += f"; bar {least_reuse:.0f}: {_met(reuse.median >= least_reuse)}"
        lines.append(f"{line}.")
    return "\n".join(lines)


def _by_seed(by_policy: Mapping[str, Sequence[Run]], off: str) -> list[tuple[Run, Run]]:
    """Pairs of our run and their run with the same seed."""
    theirs = {run.seed: run for run in by_policy.get(off, ())}
    return [(run, theirs[run.seed]) for run in by_policy.get(OURS, ()) if run.seed in theirs]


def _met(is_met: bool) -> str:
    return "met" if is_met else "**not met**"
