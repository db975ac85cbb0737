"""Draws a run as one page of plots.

The page shows latencies with their percentiles, goodput, refusals, hits, and each instance's load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import matplotlib as mpl

from loadtests.traffic.report import Part, Run, Slo

mpl.use("Agg")
import matplotlib.pyplot as plt  # imported after a backend that needs no screen is chosen

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKED: Final = (0.5, 0.95, 0.99)


def draw(run: Run, found: Sequence[Part], slo: Slo, path: Path) -> None:
    """Draw the page. The first part in `found` must be the whole run."""
    done = [a for a in run.answers if a.is_answered]
    whole, scenarios = found[0], found[1:]
    names = [p.name for p in scenarios]
    figure, grid = plt.subplots(3, 3, figsize=(15, 11))
    (ttft, tpot, e2e), (over_time, goodput, refused), (hits, load, tries) = grid
    _distribution(ttft, [1e3 * a.ttft_s for a in done], "TTFT, ms", 1e3 * slo.ttft_s)
    streams = [1e3 * a.tpot_s for a in done if a.num_tokens > 1]
    _distribution(tpot, streams, "TPOT, ms", 1e3 * slo.tpot_s)
    _distribution(e2e, [1e3 * a.e2e_s for a in done], "E2E, ms")
    over_time.scatter([a.sent_at for a in done], [1e3 * a.ttft_s for a in done], s=4)
    over_time.set_title("TTFT, ms, by when it was sent, s")
    span_s = max((a.sent_at for a in run.answers), default=0.0) or 1.0
    rates = {
        "sent": [p.num_requests / span_s for p in scenarios],
        "within the SLO": [p.goodput_per_s for p in scenarios],
    }
    _bars(goodput, rates, names)
    goodput.set_title(f"requests/s; goodput of all {whole.goodput_per_s:.1f}")
    _bars(
        refused,
        {
            "refused (429, 503)": [p.num_refused for p in scenarios],
            "failed": [p.num_failed for p in scenarios],
        },
        names,
    )
    refused.set_title(f"not answered: {whole.num_refused} refused, {whole.num_failed} failed")
    _bars(hits, {"": [p.hit_percent for p in scenarios]}, names)
    hits.set_title(f"hit rate, % of prompt tokens; of all {whole.hit_percent:.1f}")
    _named(load, run.admitted, "prompts and streams admitted, by instance")
    _named(tries, run.rejections, "calls, by how many prefills refused them first")
    ceiling = f" of {run.ceiling_per_s:.0f} it can" if run.ceiling_per_s else ""
    figure.suptitle(
        f"{whole.num_requests} requests; the generator sent {run.peak_per_s}/s at most{ceiling}, "
        f"{run.late_ms:.0f} ms late at most"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _distribution(axis: Axes, values: Sequence[float], label: str, slo: float = 0.0) -> None:
    ordered = sorted(values)
    axis.plot(ordered, [100 * (i + 1) / len(ordered) for i in range(len(ordered))])
    marks = []
    for q in _MARKED if ordered else ():
        at = ordered[int(q * (len(ordered) - 1))]
        axis.plot([at], [100 * q], "o", color="black", markersize=3)
        marks.append(f"p{100 * q:.0f} {at:.0f}")
    if slo:
        axis.axvline(slo, linestyle="--", color="grey")
        marks.append(f"SLO {slo:.0f}")
    axis.set_title(f"{label}: % below\n{', '.join(marks)}", fontsize=10)


def _bars(axis: Axes, groups: Mapping[str, Sequence[float]], names: Sequence[str]) -> None:
    width = 0.8 / len(groups)
    for place, (label, values) in enumerate(groups.items()):
        axis.bar([i + place * width for i in range(len(names))], values, width, label=label)
    axis.set_xticks([i + 0.4 - width / 2 for i in range(len(names))], names)
    axis.tick_params(axis="x", rotation=30, labelsize=7)
    axis.set_ylim(bottom=0)
    if len(groups) > 1:
        axis.legend(fontsize=7)


def _named(axis: Axes, values: Mapping[str, float], title: str) -> None:
    axis.bar(list(values), list(values.values()))
    axis.tick_params(axis="x", rotation=60, labelsize=7)
    axis.set_title(title)
