"""Finds the metrics and labels that a PromQL query names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import promql_parser

# Values that PromQL's parser accepts in place of Grafana's own variables, for scrapes every 15 s.
_VARIABLES = {"$__rate_interval": "1m", "$__interval": "15s", "$__range": "1h"}


@dataclass(slots=True)
class Named:
    """The names in a query.

    `metrics` has the labels that the query matches, by metric. `labels` are the labels by which the
    query groups or joins.
    """

    metrics: dict[str, set[str]] = field(default_factory=dict)
    labels: set[str] = field(default_factory=set)


def plain(query: str, rate_interval: str = "", **variables: str) -> str:
    """Replace Grafana's variables in a query. A variable without a value matches everything."""
    for name, value in (_VARIABLES | _given(rate_interval)).items():
        query = query.replace(name, value)
    return re.sub(r"\$(\w+)", lambda found: variables.get(found[1], ".*"), query)


def _given(rate_interval: str) -> dict[str, str]:
    return {"$__rate_interval": rate_interval} if rate_interval else {}


def named(query: str) -> Named:
    """The metrics and labels in a query. Raises ValueError if the query is not PromQL."""
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
