"""Draws one page: the throughput of each ratio beside the formula, the share of T_p, and where the
loop ends.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from loadtests.sim.ratio import loop, sweep
from loadtests.sim.ratio.report import Results, medians


def draw(results: Results, path: Path) -> None:
    figure, rows = plt.subplots(2, 3, figsize=(13, 7))
    for axis, workload in zip(rows[0], sweep.WORKLOADS, strict=True):
        _sweep(axis, workload, [b for b in results.of("sweep") if b.workload == workload.name])
    _shares(rows[1][0], results.of("sweep"))
    _paper(rows[1][1], results.of("paper"))
    _convergence(rows[1][2], results.of("convergence"))
    figure.suptitle("Simulated: P:D ratios of 8 instances", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _sweep(axis: Axes, workload: sweep.Workload, found: list[sweep.Best]) -> None:
    carried = medians(found)
    order = sorted(carried, key=lambda s: s.num_prefill)
    best = workload.profile().best_split(sweep.TOTAL)
    colours = ["tab:green" if split == best else "tab:gray" for split in order]
    low = [carried[s] - min(b.per_s for b in found if b.split == s) for s in order]
    high = [max(b.per_s for b in found if b.split == s) - carried[s] for s in order]
    names = [str(split) for split in order]
    axis.bar(names, [carried[s] for s in order], yerr=[low, high], color=colours)
    formula = [workload.profile().phi(s).value * s.total for s in order]
    axis.plot(names, formula, "k_", markersize=14, label="formula")
    axis.set_title(f"{workload.name}: answers/s", fontsize=8)
    axis.legend(fontsize=7)


def _shares(axis: Axes, found: list[sweep.Best]) -> None:
    for workload in sweep.WORKLOADS:
        own = [b for b in found if b.workload == workload.name and b.e2e_s]
        order = sorted({b.split for b in own}, key=lambda s: s.num_prefill)
        shares = [
            statistics.median(b.t_p_s / b.e2e_s for b in own if b.split == split) for split in order
        ]
        axis.plot([str(s) for s in order], shares, marker="o", label=workload.name)
    axis.set_title("T_p / E2E at the most users (fig. 12c, d)", fontsize=8)
    axis.legend(fontsize=6)


def _paper(axis: Axes, found: list[sweep.Best]) -> None:
    names = [str(split) for split in sweep.PAPER_SPLITS]
    for offset, workload in ((-0.2, sweep.PAPER), (0.2, sweep.PAPER_LONGER)):
        own = [b for b in found if b.workload == workload.name]
        carried = medians(own)
        if carried:
            heights = [carried[split] for split in sweep.PAPER_SPLITS]
            places = [i + offset for i in range(len(names))]
            axis.bar(places, heights, width=0.4, label=workload.name)
    axis.set_xticks(range(len(names)), names)
    axis.set_title("mismatch (fig. 12a, b): answers/s", fontsize=8)
    axis.legend(fontsize=7)


def _convergence(axis: Axes, found: list[loop.Convergence]) -> None:
    starts = list(dict.fromkeys(c.start for c in found))
    for position, start in enumerate(starts):
        own = [c for c in found if c.start == start]
        for each in own:
            first, last = int(each.start.split(":")[0]), int(each.end.split(":")[0])
            axis.annotate("", (position, last), (position, first), arrowprops={"arrowstyle": "->"})
            axis.plot(position, last, "o", color="tab:green")
    if found:
        axis.axhline(int(found[0].best.split(":")[0]), linestyle=":", color="tab:gray")
    axis.set_xticks(range(len(starts)), starts)
    axis.set_ylim(1, 7)
    axis.set_ylabel("prefills of 8", fontsize=8)
    axis.set_title("the loop from every split (S32)", fontsize=8)
