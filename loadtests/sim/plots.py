"""Draws a comparison as one page of plots.

Each case has a row with reuse and TTFT by policy. Bars show the spread over the seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from loadtests.sim.compare import Outcome

_PANELS: Final = (
    ("reuse_percent", "reuse, % of blocks"),
    ("ttft_ms_mean", "TTFT mean, ms"),
    ("ttft_ms_p95", "TTFT p95, ms"),
)


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    cases = list(dict.fromkeys(o.case for o in outcomes))
    policies = list(dict.fromkeys(o.policy for o in outcomes))
    figure, rows = plt.subplots(
        len(cases), len(_PANELS), figsize=(13, 0.5 + 2.1 * len(cases)), squeeze=False
    )
    for axes, case in zip(rows, cases, strict=True):
        for axis, (field, label) in zip(axes, _PANELS, strict=True):
            for position, policy in enumerate(reversed(policies)):
                values = sorted(
                    getattr(o, field) for o in outcomes if (o.case, o.policy) == (case, policy)
                )
                if not values:
                    continue
                middle = values[len(values) // 2]
                spread = [[middle - values[0]], [values[-1] - middle]]
                colour = "tab:green" if policy == "default" else "tab:gray"
                axis.barh(position, middle, xerr=spread, color=colour)
            axis.set_yticks(range(len(policies)), list(reversed(policies)), fontsize=7)
            axis.set_title(f"{case}: {label}", fontsize=8)
            axis.tick_params(axis="x", labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
