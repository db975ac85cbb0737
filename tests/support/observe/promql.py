"""PromQL as tests need it: which metrics and labels a query names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import promql_parser

# Grafana's own variables, in a form that PromQL's parser takes. A scrape comes every 15 s.
_VARIABLES = {"$__rate_interval": "1m", "$__interval": "15s", "$__range": "1h"}


@dataclass(slots=True)
class Named:
    """`metrics`: the labels that the query matches, by metric. `labels`: the labels by which it
    groups or joins.
    """

    metrics: dict[str, set[str]] = field(default_factory=dict)
    labels: set[str] = field(default_factory=set)


def plain(query: str, rate_interval: str = "", **variables: str) -> str:
    """The query with Grafana's variables replaced; a variable without a value matches all."""
    for name, value in (_VARIABLES | _given(rate_interval)).items():
        query = query.replace(name, value)
    return re.sub(r"\$(\w+)", lambda found: variables.get(found[1], ".*"), query)


def _given(rate_interval: str) -> dict[str, str]:
    return {"$__rate_interval": rate_interval} if rate_interval else {}


def named(query: str) -> Named:
    """Raises ValueError if the query is not PromQL."""
    found = Named()

    def visit(expr: promql_parser.Expr) -> None:
        for selector in _selectors(expr):
            matched = found.metrics.setdefault(selector.name or "", set())
            matched |= {each.name for each in selector.matchers.matchers}
        found.labels |= set(_grouping(expr))

    promql_parser.walk(promql_parser.parse(plain(query)), visit)
    return found


def _selectors(expr: promql_parser.Expr) -> Iterator[promql_parser.VectorSelector]:
    if isinstance(expr, promql_parser.VectorSelector):
        yield expr
    elif isinstance(expr, promql_parser.MatrixSelector):
        yield expr.vector_selector


def _grouping(expr: promql_parser.Expr) -> Iterator[str]:
    if isinstance(expr, promql_parser.AggregateExpr) and expr.modifier is not None:
        yield from expr.modifier.labels
    elif isinstance(expr, promql_parser.BinaryExpr) and expr.modifier is not None:
        yield from expr.modifier.group_labels or ()
        if expr.modifier.matching is not None:
            yield from expr.modifier.matching.labels
