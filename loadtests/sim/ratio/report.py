"""Writes the report of `make bench NAME=ratio`.

Its tables have medians (lowest..highest) over the seeds. Texts compare the numbers with the claims
of P/D-Serve's paper.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, ItemsView, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from loadtests.harness.results import Spread
from loadtests.sim.ratio import aggregated, faults, sweep
from pdmesh.core.ratio.throughput import Split

MODEST: Final = 0.6  # P/D-Serve's margin of the best ratio over other ratios
_NUM_WEEKS: Final = 1000


@dataclass(slots=True)
class Results:
    """The results of the jobs, by kind."""

    _found: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, kind: str, outcome: object) -> None:
        self._found.setdefault(kind, []).append(outcome)

    def of(self, kind: str) -> list[Any]:
        return self._found.get(kind, [])

    def items(self) -> ItemsView[str, list[Any]]:
        return self._found.items()


def markdown(results: Results) -> str:
    parts: list[tuple[str, Callable[[Results], list[str]]]] = [
        ("sweep", _sweep),
        ("paper", _paper),
        ("change", _changes),
        ("convergence", _convergence),
        ("aggregated", _aggregated),
        ("fault", _faults),
        ("scale", _scale),
    ]
    lines = [
        (
            "Simulated, but for the CPU times of the last table: the mesh's own cores on a "
            "virtual clock, with the laws in"
            " `libs/pdmesh/engine/step_time_laws.py`. Median (lowest..highest) over the seeds."
        ),
    ]
    for kind, make in parts:
        if results.of(kind):
            lines += ["", *make(results)]
    return "\n".join(lines)


def medians(found: Iterable[sweep.Best]) -> dict[Split, float]:
    """The median answers/s of each split."""
    by_split: dict[Split, list[float]] = {}
    for each in found:
        by_split.setdefault(each.split, []).append(each.per_s)
    return {split: statistics.median(values) for split, values in by_split.items()}


def _sweep(results: Results) -> list[str]:
    found: list[sweep.Best] = results.of("sweep")
    lines = [
        f"## Every integer ratio of {sweep.TOTAL} instances (S2, S30, S61)",
        "",
        (
            "Users in a closed loop, more until one answer is later than three times what a "
            "request takes with full batches (S65)."
        ),
    ]
    for workload in sweep.WORKLOADS:
        own = [b for b in found if b.workload == workload.name]
        carried = medians(own)
        top = max(carried, key=lambda s: carried[s])
        chosen = workload.profile().best_split(sweep.TOTAL)
        lines += [
            "",
            f"### {workload.name}",
            "",
            "| P:D | answers/s | formula | of the best | users | E2E s | T_p / E2E |",
            "|---|---|---|---|---|---|---|",
        ]
        for split in sorted(carried, key=lambda s: s.num_prefill):
            runs = [b for b in own if b.split == split]
            lines.append(_sweep_row(split, runs, carried[split] / carried[top]))
        gains = {s: carried[top] / rate - 1 for s, rate in carried.items() if s != top and rate}
        others = list(gains.values())
        errors = [abs(b.formula_per_s / b.per_s - 1) for b in own if b.per_s]
        lines += [
            "",
            (
                f"Formula (1) chooses **{chosen}**, the best of all runs is **{top}**; the chosen "
                "one carries"
                f" {carried[chosen] / carried[top]:.1%} of it. The best carries {min(others):.0%} "
                f"to {max(others):.0%} more than the"
                f" others, {MODEST:.0%} or more over {sum(m >= MODEST for m in others)} of "
                f"{len(others)}. The formula is off by"
                f" {statistics.mean(errors):.1%} on average, {max(errors):.1%} at most."
            ),
            "",
            _over_one_sided(gains),
        ]
    return [*lines, "", _MISMATCHED]


# From P/D-Serve, section 4.2 and figures 12a, 12b, 13a.
_MISMATCHED: Final = (
    "**What counts as mismatched.** P/D-Serve says that under the optimum ratio the throughput "
    '"overcomes the others by at least 60%"'
    " (4.2, figure 13a) and does not list the others; the ratios that its text and figures 12a "
    "and 12b name are 1:N and N:1, instances of"
    " one role alone increased, which it calls the P/D mismatch. The sentence under each table "
    "above says both: the gain over 1:N and N:1"
    " of the same total, and over each other ratio. A ratio next to the optimum carries nearly as "
    "much where both roles are near their"
    " limit, so that 60 % over every other ratio cannot hold for every workload."
)


def _over_one_sided(gains: Mapping[Split, float]) -> str:
    """The gain over 1:N and N:1, except over the best ratio itself."""
    ends = [s for s in gains if 1 in (s.num_prefill, s.num_decode)]
    named = ", ".join(
        f"{gains[s]:+.0%} over {s}" for s in sorted(ends, key=lambda s: s.num_prefill)
    )
    least = min(gains[s] for s in ends)
    verdict = "holds" if least >= MODEST else "does not hold"
    return (
        f"Mismatched as 1:N and N:1: {named}; at least {MODEST:.0%} {verdict} (least {least:+.0%})."
    )


def _sweep_row(split: Split, runs: Sequence[sweep.Best], share: float) -> str:
    per_s = Spread.of([b.per_s for b in runs]).text(".2f")
    e2e_s = statistics.median(b.e2e_s for b in runs)
    shares = [b.t_p_s / b.e2e_s for b in runs if b.e2e_s]
    t_p = f"{statistics.median(shares):.1%}" if shares else "-"
    users = statistics.median(b.num_users for b in runs)
    return (
        f"| {split} | {per_s} | {runs[0].formula_per_s:.2f} | {share:.0%} | {users:.0f} | "
        f"{e2e_s:.1f} | {t_p} |"
    )


def _paper(results: Results) -> list[str]:
    found: list[sweep.Best] = results.of("paper")
    lines = [
        "## The paper's mismatch: one prefill carries 0.6, one decode 0.7 (S61)",
        "",
        "| P:D | T_d: answers/s | formula | T_d +50 %: answers/s | formula |",
        "|---|---|---|---|---|",
    ]
    for split in sweep.PAPER_SPLITS:
        cells = []
        for workload in (sweep.PAPER, sweep.PAPER_LONGER):
            runs = [b for b in found if (b.workload, b.split) == (workload.name, split)]
            cells.append(Spread.of([b.per_s for b in runs]).text(".3f"))
            cells.append(f"{runs[0].formula_per_s:.3f}")
        lines.append(f"| {split} | {' | '.join(cells)} |")
    carried = medians(b for b in found if b.workload == sweep.PAPER.name)
    best = sweep.PAPER.profile().best_split(5)
    gains = [f"{carried[best] / carried[s] - 1:+.0%} over {s}" for s in (Split(4, 1), Split(1, 4))]
    return [*lines, "", f"Of five instances, {best} as formula (1) chooses it: {', '.join(gains)}."]


def _changes(results: Results) -> list[str]:
    lines = [
        "## The loop: findings and calm (S29)",
        "",
        "One group of 8 under Poisson arrivals, windows of 10 s, the change at 300 s.",
        "",
        "| what changed | seeds | wanted | windows until it was found | moves | failed requests |",
        "|---|---|---|---|---|---|",
    ]
    for what in dict.fromkeys(c.what for c in results.of("change")):
        own = [c for c in results.of("change") if c.what == what]
        wanted = ", ".join(sorted({c.wanted or "nothing" for c in own}))
        windows = [c.num_windows for c in own if c.num_windows is not None]
        found = Spread.of(windows).text(".0f") if windows else "-"
        moves = Spread.of([c.num_moves for c in own]).text(".0f")
        failed = f"{sum(c.num_failed for c in own)} of {sum(c.num_requests for c in own)}"
        lines.append(f"| {what} | {len(own)} | {wanted} | {found} | {moves} | {failed} |")
    calm = results.of("calm")
    if calm:
        planned = sum(c.num_planned for c in calm)
        lines += [
            "",
            f"{len(calm)} hours of an unchanged workload with Poisson noise: {planned} moves.",
        ]
    return lines


def _convergence(results: Results) -> list[str]:
    lines = [
        "## Without a profile, from every split (S32)",
        "",
        (
            "An hour at 85 % of what the best split carries; single role changes, each judged "
            "before the next."
        ),
        "",
        "| start | ends at | best by (1) | moves | undone | last move at s | within one |",
        "|---|---|---|---|---|---|---|",
    ]
    found = results.of("convergence")
    for start in dict.fromkeys(c.start for c in found):
        own = [c for c in found if c.start == start]
        ends = ", ".join(sorted({c.end for c in own}))
        moves = Spread.of([c.num_moves for c in own]).text(".0f")
        last = Spread.of([c.last_move_s for c in own]).text(".0f")
        undone, near = sum(c.num_undone for c in own), sum(c.distance <= 1 for c in own)
        lines.append(
            f"| {start} | {ends} | {own[0].best} | {moves} | {undone} | {last} | {near} of "
            f"{len(own)} |"
        )
    return lines


def _aggregated(results: Results) -> list[str]:
    found: list[aggregated.Goodput] = results.of("aggregated")
    lines = [
        f"## Disaggregated against aggregated, {aggregated.TOTAL} instances each (S63)",
        "",
        (
            f"Highest rate at which 99 % of {aggregated.NUM_REQUESTS} requests have TTFT within "
            f"{aggregated.TTFT_S:.0f} s and the mean"
            " time per token of the scene. Law `mocker`. The paper's 6.7 compares with its own "
            "earlier system; this is the factor of"
            " this law, these lengths and these SLOs, against the best of three chunk sizes."
        ),
        "",
        "| scene | P/D, best near (1) | aggregated, best chunk | factor |",
        "|---|---|---|---|",
    ]
    for scene in dict.fromkeys(g.scene for g in found):
        own = [g for g in found if g.scene == scene]
        ours, theirs = _best_mode(own, "P/D"), _best_mode(own, "aggregated")
        factor = f"{ours[1] / theirs[1]:.2f}" if theirs[1] else "aggregated never keeps them"
        lines.append(
            f"| {scene} | {ours[0]}: {ours[1]:.1f}/s | {theirs[0]}: {theirs[1]:.1f}/s | {factor} |"
        )
    return lines


def _best_mode(found: Sequence[aggregated.Goodput], kind: str) -> tuple[str, float]:
    by_mode: dict[str, list[float]] = {}
    for each in found:
        if each.mode.startswith(kind):
            by_mode.setdefault(each.mode, []).append(each.per_s)
    rates = {mode: statistics.median(values) for mode, values in by_mode.items()}
    top = max(rates, key=lambda mode: rates[mode])
    return top, rates[top]


def _faults(results: Results) -> list[str]:
    without: list[faults.Outcome] = results.of("quiet")
    num_quiet = sum(o.num_requests for o in without)
    num_bad = sum(o.num_failed + o.num_late for o in without)
    lines = [
        f"## A week of {faults.NUM_DEVICES:,} devices (S38)",
        "",
        (
            f"{faults.NUM_DEVICES // faults.DEVICES_PER_INSTANCE:,} machines of "
            f"{faults.DEVICES_PER_INSTANCE} devices: {faults.NUM_GROUPS}"
            f" groups of {faults.SPLIT[0]}:{faults.SPLIT[1]} at 60 % of what they carry, and "
            f"{faults.NUM_SPARES} spares. Devices fail by"
            " chance all week long, at both ends of the paper's rate; each takes its machine with "
            "it (SIGKILL of its group's busiest"
            " instance of that role, with all its requests). A spare loads for "
            f"{faults.LOAD_S:.0f} s, the broken machine is one after"
            f" {faults.REPAIR_S / 3600:.0f} h. Faults that overlap in a group are played together."
        ),
        "",
        (
            "The requests of a whole week (some four hundred million) cannot be played one by one. "
            "All times in which a group lacks an instance are played request by request, from "
            f"{faults._BEFORE_S:.0f} s before the loss. Of groups that lack nothing, a sample of "
            f"{num_quiet:,} requests is played. {num_bad} of these failed or were late, which "
            f"means less than {_upper_bound(num_bad, num_quiet):.4%} with 95 % confidence. The "
            "week's numbers combine both, weighted by time."
        ),
        "",
        (
            "| faults per week and 400 | faults | group-time around them | requests played there "
            "| went on elsewhere | failed | late | answered"
            f" within {faults.E2E_SLO_S:.0f} s around faults | answered in the week | within "
            f"{faults.E2E_SLO_S:.0f} s in the week |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    outcomes: list[faults.Outcome] = results.of("fault")
    for rate in faults.RATES:
        around = [o for o in outcomes if o.per_week_and_400 == rate]
        week = faults.week(rate, around, without)
        sums = [sum(o.num_requests for o in around), sum(o.num_migrated for o in around)]
        bad = [sum(o.num_failed for o in around), sum(o.num_late for o in around)]
        lines.append(
            f"| {rate:g} | {week.num_faults} | {week.time_around:.3%} | {sums[0]:,} | {sums[1]:,} "
            f"| {bad[0]} | {bad[1]} |"
            f" {week.in_time_around:.3%} | {week.answered:.5%} | {week.in_time:.5%} |"
        )
    stood_in = [seconds for o in outcomes for seconds in o.stood_in_after_s]
    num_waited = faults.num_weeks_without_a_spare(faults.RATES[-1], _NUM_WEEKS)
    lines += [
        "",
        (
            f"A substitute served after {Spread.of(stood_in).text('.0f')} s. Of {_NUM_WEEKS} "
            f"weeks at {faults.RATES[-1]:g} faults, without"
            f" requests, {num_waited} had a group that had to wait for a repair."
        ),
    ]
    return lines


def _upper_bound(num_bad: int, num: int) -> float:
    """The upper bound of the share of bad requests, with 95 % confidence (Wilson).

    If no request is bad, the bound is close to 3 / num.
    """
    z = 1.645
    share, spread = num_bad / num, z * z / num
    middle = share + spread / 2
    return (middle + z * math.sqrt(share * (1 - share) / num + spread / (4 * num))) / (1 + spread)


def _scale(results: Results) -> list[str]:
    lines = [
        "## CPU time of decisions (S66)",
        "",
        (
            "Measured, not simulated: the cores with that many instances in groups of 4:6, on the "
            "machine above; the share of one core"
            " if it happens as often as said."
        ),
        "",
        "| decision | instances | CPU | per second | of one core |",
        "|---|---|---|---|---|",
    ]
    for cost in results.of("scale"):
        often = f"{cost.per_s:,.4g}"
        share = f"{cost.seconds * cost.per_s:.2%}"
        lines.append(
            f"| {cost.what} | {cost.num_instances:,} | {1e6 * cost.seconds:,.1f} us | {often} | "
            f"{share} |"
        )
    return lines
