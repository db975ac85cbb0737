"""Dashboards and alerts use only metrics and labels that the code has.

The dashboards' files equal the output of their definitions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdmesh.errors import BY_REASON
from pdmesh.telemetry import labels as known_labels
from pdmesh.telemetry import names
from tests.support.observe.promql import named, plain
from tools.instruments import Instrument, all_instruments, instruments
from tools.observe.__main__ import FOLDER
from tools.observe.dashboard import to_json
from tools.observe.dashboards import DASHBOARDS

ROOT = Path(__file__).parents[3]
RULES = ROOT / "deploy/observe/prometheus/rules.yml"
RUNBOOKS = ROOT / "docs/operations.md"
# The series of Prometheus and of its client library, with their labels.
OTHERS = {
    "up": set[str](),
    "ALERTS": {"alertname", "alertstate"},
    "process_cpu_seconds_total": set[str](),
    "process_resident_memory_bytes": set[str](),
}
OF_TARGETS = {"instance", "job"}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


INSTRUMENTS = all_instruments(ROOT)
ALERTS = [rule for rule in rules() if "alert" in rule]


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    """The labels of each series that a query may use."""
    series = {
        name: {*each.labels, *(("le",) if name.endswith("_bucket") else ())}
        for each in INSTRUMENTS.values()
        for name in each.series
    }
    records = {rule["record"]: {"pdmesh_scenario"} for rule in rules() if "record" in rule}
    return series | records | OTHERS


def queries() -> Iterator[tuple[str, str]]:
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels:
            for number, query in enumerate(panel.queries.values()):
                yield f"{dashboard.uid}/{panel.title}/{number}", query
        for each in dashboard.variables:
            yield f"{dashboard.uid}/${each.name}", f'{each.metric}{{{each.label}=~".*"}}'
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"]


@pytest.mark.req("S139")
@pytest.mark.parametrize("query", [pytest.param(q, id=where) for where, q in queries()])
def test_a_query_names_only_metrics_and_labels_of_the_code(
    query: str, known: dict[str, set[str]]
) -> None:
    found = named(query)
    assert found.metrics
    labels = set(OF_TARGETS)
    for metric, matched in found.metrics.items():
        assert metric in known, f"no process has {metric}"
        assert matched <= known[metric] | OF_TARGETS, f"{metric} has the labels {known[metric]}"
        labels |= known[metric]
    assert found.labels <= labels


def test_an_unknown_label_and_a_broken_query_are_found() -> None:
    found = named('sum by (role) (rate(a_total{kind="x"}[$__rate_interval])) / on (zone) b')
    assert found.metrics == {"a_total": {"kind"}, "b": set()}
    assert found.labels == {"role", "zone"}
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        named("sum by (a) (rate(b[5m])")
    assert plain('a{b=~"$b", c=~"$c"}', b="x") == 'a{b=~"x", c=~".*"}'


def test_the_dashboards_are_as_their_definitions_make_them() -> None:
    """If this fails, run `python -m tools.observe` and commit its output."""
    written = {path.name: path.read_text() for path in (ROOT / FOLDER).glob("*.json")}
    assert written == {f"{each.uid}.json": to_json(each) for each in DASHBOARDS}


def test_panels_have_their_own_place_and_number_and_say_what_they_show() -> None:
    for dashboard in DASHBOARDS:
        panels = json.loads(to_json(dashboard))["panels"]
        numbers = [panel["id"] for panel in panels]
        assert len(set(numbers)) == len(numbers)
        cells = [
            (x, y)
            for place in (panel["gridPos"] for panel in panels)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        assert len(set(cells)) == len(cells), f"{dashboard.uid}: panels lie on each other"
        assert max(x for x, _ in cells) < 24
        for panel in dashboard.panels:
            assert panel.description, panel.title
            assert len(panel.queries) <= 8, panel.title


def test_every_legend_names_labels_that_the_query_leaves() -> None:
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels:
            for legend, query in panel.queries.items():
                shown = set(re.findall(r"{{(\w+)}}", legend))
                grouped = named(query).labels
                whole = {label for labels in named(query).metrics.values() for label in labels}
                has_group = bool(grouped)
                allowed = grouped if has_group else whole | OF_TARGETS | _labels_of(query)
                assert shown <= allowed, f"{panel.title}: {legend}"


def _labels_of(query: str) -> set[str]:
    by_series = {s: i for i in INSTRUMENTS.values() for s in i.series}
    found = (by_series.get(metric) for metric in named(query).metrics)
    labels = {label for each in found if each is not None for label in each.labels}
    is_record = any(metric.startswith("pdmesh:") for metric in named(query).metrics)
    return labels | ({"pdmesh_scenario"} if is_record else set())


@pytest.mark.parametrize("rule", [pytest.param(r, id=r["alert"]) for r in ALERTS])
def test_an_alert_says_how_bad_it_is_and_has_a_section_of_the_runbook(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{rule['alert'].lower()}"
    section = re.search(
        rf"^### {rule['alert']}\n\n(.+?)(?=^##)", RUNBOOKS.read_text(), re.MULTILINE | re.DOTALL
    )
    assert section, f"docs/operations.md has no section {rule['alert']}"
    assert len(section[1].split()) >= 20


def test_the_runbook_has_no_section_of_an_alert_that_is_gone() -> None:
    sections = re.findall(r"^### (Pdmesh\w+)$", RUNBOOKS.read_text(), re.MULTILINE)
    assert sections == sorted(set(sections), key=sections.index)
    assert set(sections) == {rule["alert"] for rule in ALERTS}


def test_calls_that_fail_through_their_client_wake_nobody() -> None:
    """The alert ignores the reasons with codes that a client can cause. A 403 or 409 comes from a
    process of the mesh or from an operator, so a client's call must not fail with it.
    """
    (rule,) = [rule for rule in ALERTS if rule["alert"] == "PdmeshCallsFail"]
    found = re.search(r'pdmesh_reason!~"([^"]+)"', rule["expr"])
    assert found
    ignored = {reason for reason in BY_REASON if re.fullmatch(found[1], reason)}
    by_client = {400, 401, 404, 429}
    assert ignored == {r for r, error in BY_REASON.items() if error.http_status in by_client}


def test_every_metric_of_the_code_is_known_with_its_labels() -> None:
    assert set(known_labels.LABELS) <= set(INSTRUMENTS), "labels of a metric that nothing makes"
    values = [value for name, value in vars(names).items() if not name.startswith("ATTR_")]
    ours = {v for v in values if isinstance(v, str) and v.startswith(("pdmesh.", "gen_ai.server"))}
    module = {"pdmesh.telemetry", "pdmesh.telemetry.names"}
    assert ours - module == set(INSTRUMENTS)


def test_instruments_are_spelled_as_prometheus_shows_them() -> None:
    source = (
        'metrics.counter(names.KV_TRANSFER_BYTES, "B", "By")\n'
        'metrics.histogram(names.PLAN_DURATION, "P", buckets=(1, 2))\n'
        'metrics.total(names.USAGE, "U", seconds, "s")\n'
        '_MEANS = ((names.SCENARIO_T_P, "T", "s", lambda s: s.t_p),)\n'
        'other(names.SLOTS, "S")\n'
    )
    assert [(each.kind, each.series) for each in instruments(source)] == [
        ("counter", ("pdmesh_kv_transfer_bytes_total",)),
        (
            "histogram",
            tuple(f"pdmesh_plan_duration_seconds_{x}" for x in ("bucket", "count", "sum")),
        ),
        ("counter", ("pdmesh_usage_instance_time_seconds_total",)),
        ("gauge", ("pdmesh_scenario_t_p_seconds",)),
    ]
    assert Instrument("TTFT_SLO", "counter", "", "1").labels == (
        "pdmesh_scenario",
        "pdmesh_outcome",
    )


def test_a_label_that_the_table_lacks_is_refused() -> None:
    known_labels.check(names.REQUESTS, ["pdmesh.outcome"])
    with pytest.raises(AssertionError, match=r"pdmesh\.requests has no label \['tenant'\]"):
        known_labels.check(names.REQUESTS, ["pdmesh.outcome", "tenant"])
