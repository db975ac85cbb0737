"""Queries that several panels share.

They tell instances apart by Prometheus' label `instance`. A scrape configuration sets this label to
the name of the process (docs/observe.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

INTERVAL: Final = "[$__rate_interval]"
HERE: Final = 'instance=~"$instance"'  # the instances that are chosen on the dashboard
NO_FAULT: Final = "while nothing fails"


def rate(metric: str, by: str = "", where: str = "") -> str:
    """The rate of a counter, summed.

    `by` has the labels to sum by, and `where` the matchers, both in PromQL.
    """
    head = f"sum by ({by}) " if by else "sum"
    chosen = f"{{{where}}}" if where else ""
    return f"{head}(rate({metric}{chosen}{INTERVAL}))"


def quantiles(histogram: str, where: str = "") -> Mapping[str, str]:
    counts = rate(f"{histogram}_bucket", "le", where)
    return {f"p{round(q * 100)}": f"histogram_quantile({q}, {counts})" for q in (0.5, 0.95, 0.99)}


def or_zero(query: str) -> str:
    return f"({query} or vector(0))"
