"""Defines a dashboard in a short form, and turns it into Grafana's JSON.

A row's panels are placed from left to right, and continue below if the width is used up.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_SCHEMA: Final = 39  # Grafana 11 and newer; older versions refuse it
_COLUMNS: Final = 24
_DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_HEIGHTS: Final = {"stat": 4, "timeseries": 8, "table": 8}


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel. `queries` has the PromQL expression of each legend. `unit` is one of Grafana's.

    `empty_when` says why a healthy mesh under load may have no data here. If it is empty, the panel
    always has data.
    """

    title: str
    description: str
    queries: Mapping[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    empty_when: str = ""
    is_stacked: bool = False
    bad_above: float | None = None
    bad_below: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top of a dashboard among the values of a label. Queries use it as `$name`."""

    name: str
    metric: str
    label: str


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str
    title: str
    description: str
    rows: Sequence[Row]
    variables: Sequence[Variable] = ()

    @property
    def panels(self) -> Iterable[Panel]:
        return (panel for row in self.rows for panel in row.panels)


def to_json(dashboard: Dashboard) -> str:
    """The JSON file that Grafana loads. Equal definitions give equal files."""
    return json.dumps(_body(dashboard), indent=1, ensure_ascii=False) + "\n"


def _body(dashboard: Dashboard) -> dict[str, Any]:
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["pdmesh"],
        "editable": False,
        "graphTooltip": 1,  # one crosshair for all panels
        "refresh": "30s",
        "schemaVersion": _SCHEMA,
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {
                "type": "dashboards",
                "title": "pdmesh",
                "tags": ["pdmesh"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {"list": [_datasource(), *map(_variable, dashboard.variables)]},
        "panels": list(_placed(dashboard.rows)),
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}


def _variable(variable: Variable) -> dict[str, Any]:
    query = f"label_values({variable.metric}, {variable.label})"
    return {
        "name": variable.name,
        "type": "query",
        "datasource": _DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": "values"},
        "refresh": 2,  # refresh when the time range changes
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    }


def _placed(rows: Iterable[Row]) -> Iterable[dict[str, Any]]:
    number, y = 0, 0
    for row in rows:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1},
        }
        x, y, height = 0, y + 1, 0
        for panel in row.panels:
            if x + panel.width > _COLUMNS:
                x, y, height = 0, y + height, 0
            number += 1
            place = {"x": x, "y": y, "w": panel.width, "h": _HEIGHTS[panel.kind]}
            yield {"id": number, **_panel(panel), "gridPos": place}
            x, height = x + panel.width, max(height, _HEIGHTS[panel.kind])
        y += height


def _panel(panel: Panel) -> dict[str, Any]:
    note = f"\n\nEmpty {panel.empty_when}." if panel.empty_when else ""
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description + note,
        "datasource": _DATASOURCE,
        "targets": [
            _target(letter, legend, query, panel.kind)
            for letter, (legend, query) in zip("ABCDEFGH", panel.queries.items(), strict=False)
        ],
        "fieldConfig": {"defaults": _field(panel), "overrides": []},
        "options": _OPTIONS[panel.kind],
    }


def _target(letter: str, legend: str, query: str, kind: str) -> dict[str, Any]:
    target = {
        "refId": letter,
        "datasource": _DATASOURCE,
        "editorMode": "code",
        "expr": query,
        "legendFormat": legend,
    }
    return target if kind == "timeseries" else {**target, "instant": True, **_FORMATS[kind]}


def _field(panel: Panel) -> dict[str, Any]:
    field: dict[str, Any] = {"unit": panel.unit}
    if panel.kind == "timeseries":
        field["min"] = 0
        if panel.is_stacked:
            field["custom"] = {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}}
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.bad_above is not None:
        steps.append({"color": "red", "value": panel.bad_above})
    if panel.bad_below is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": panel.bad_below}]
    field["thresholds"] = {"mode": "absolute", "steps": steps}
    return field


_FORMATS: Final[Mapping[str, Mapping[str, str]]] = {"stat": {}, "table": {"format": "table"}}
_OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "stat": {
        "colorMode": "value",
        "graphMode": "none",
        "reduceOptions": {"calcs": ["lastNotNull"]},
    },
    "table": {"showHeader": True},
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
}
