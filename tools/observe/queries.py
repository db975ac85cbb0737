"""Queries that panels share.

Queries tell instances apart by Prometheus' own label `instance`, which a scrape configuration sets
to the name of the process (docs/observe.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

INTERVAL: Final = "[$__rate_interval]"
HERE: Final = 'instance=~"$instance"'  # the chosen instances
NO_FAULT: Final = "while nothing fails"


def rate(metric: str, by: str = "", where: str = "") -> str:
    """The rate of a counter, summed; `by` and `where` are labels and matchers of PromQL."""
    head = f"sum by ({by}) " if by else "sum"
    chosen = f"{{{where}}}" if where else ""
    return f"{head}(rate({metric}{chosen}{INTERVAL}))"


def quantiles(histogram: str, where: str = "") -> Mapping[str, str]:
    counts = rate(f"{histogram}_bucket", "le", where)
    return {f"p{round(q * 100)}": f"histogram_quantile({q}, {counts})" for q in (0.5, 0.95, 0.99)}


def or_zero(query: str) -> str:
    return f"({query} or vector(0))"
