"""Draws a run as one picture.

It shows time against size, the split at the middle size, the wire, and the time that prefill does
not hide.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from loadtests.kv_bench import cases
from loadtests.kv_bench.report.figures import BAR_VISIBLE, BAR_WIRE, Figures

_TOTALS: Final = (
    cases.BLOCKS_ACKED,
    cases.BLOCKS_PIPELINED,
    cases.WHOLE,
    cases.CHUNKED,
    cases.LAYERS,
    "nixl_blocks",
    "nixl_checked",
    "mooncake_blocks",
    "perftest_sleep",
    "memcpy",
)
_DASHED: Final = ("nixl_blocks", "nixl_checked", "mooncake_blocks", "perftest_sleep", "memcpy")


def draw(figures: Figures, path: Path) -> None:
    count = len(figures.transports)
    figure, axes = pyplot.subplots(
        3, count, figsize=(8 * count, 14), squeeze=False, layout="constrained"
    )
    for column, transport in enumerate(figures.transports):
        _totals(axes[0][column], figures, transport)
        _split(axes[1][column], figures, transport)
        _ratios(axes[2][column], figures, transport)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _totals(axis: Any, figures: Figures, transport: str) -> None:  # matplotlib's axes have no types
    for mode in _TOTALS:
        found = {n: figures.spread(transport, n, mode) for n in figures.sizes}
        points = {n >> 20: s for n, s in found.items() if s is not None}
        if points:
            medians = [s.median for s in points.values()]
            style = "--" if mode in _DASHED else "-"
            label = cases.LABELS.get(mode, mode.replace("_", " "))
            (line,) = axis.plot(list(points), medians, style, marker="o", label=label)
            lows, highs = [s.low for s in points.values()], [s.high for s in points.values()]
            axis.fill_between(list(points), lows, highs, alpha=0.12, color=line.get_color())
    axis.set(xscale="log", yscale="log", xlabel="MiB", ylabel="ms from cache to cache")
    axis.set_title(f"{transport}: one prompt's KV (median, lowest to highest)")
    axis.set_xticks([n >> 20 for n in figures.sizes], [str(n >> 20) for n in figures.sizes])
    axis.grid(visible=True, which="both", alpha=0.25)
    axis.legend(fontsize=8)


def _split(axis: Any, figures: Figures, transport: str) -> None:
    num_bytes = figures.sizes[len(figures.sizes) // 2]
    modes = (cases.BLOCKS_ACKED, cases.BLOCKS_PIPELINED, cases.WHOLE, cases.CHUNKED, cases.LAYERS)
    for row, mode in enumerate(reversed(modes)):
        total = figures.spread(transport, num_bytes, mode)
        axis.barh(row + 0.2, total.median if total else 0, 0.35, color="lightgrey")
        left = 0.0
        for part, colour in (("gather", "C0"), ("wire", "C1"), ("scatter", "C2")):
            busy = figures.spread(transport, num_bytes, mode, f"{part}_ms")
            width = busy.median if busy else 0.0
            label = part if row == 0 else None
            axis.barh(row - 0.2, width, 0.35, left=left, color=colour, label=label)
            left += width
    axis.set_yticks(range(len(modes)), [cases.LABELS[m] for m in reversed(modes)], fontsize=8)
    axis.set(xlabel="ms", title=f"{transport}, {num_bytes >> 20} MiB: total (grey) and busy time")
    axis.legend(fontsize=8)


def _ratios(axis: Any, figures: Figures, transport: str) -> None:
    mib = [n >> 20 for n in figures.sizes]
    asleep = [figures.perftest_rate(transport, n, "sleep") for n in figures.sizes]
    polling = [figures.perftest_rate(transport, n, "poll") for n in figures.sizes]
    modes = cases.LAYERS_COMPUTED, [cases.WHOLE_COMPUTED], "visible_ms"
    visible = [figures.ratio(transport, n, *modes) for n in figures.sizes]
    for spreads, label in (
        (asleep, "rate of the wire / ucx_perftest, asleep as ours"),
        (polling, "rate of the wire / ucx_perftest, polling"),
        (visible, "visible: layer by layer / whole model"),
    ):
        points = [(x, s) for x, s in zip(mib, spreads, strict=True) if s]
        axis.errorbar(
            [x for x, _ in points],
            [s.median for _, s in points],
            [[s.median - s.low for _, s in points], [s.high - s.median for _, s in points]],
            marker="o",
            capsize=3,
            label=label,
        )
    axis.axhline(BAR_WIRE, color="C0", linestyle=":")
    axis.axhline(BAR_VISIBLE, color="C2", linestyle=":")
    axis.set(xscale="log", ylim=(0, 2.4), xlabel="MiB", title=f"{transport}: bars (dotted)")
    axis.set_xticks(mib, [str(x) for x in mib])
    axis.grid(visible=True, alpha=0.25)
    axis.legend(fontsize=8)
