"""The chart's values.schema.json has the settings of the code, and the chart's values are valid.

These tests do not need Helm. tests/integration/chart runs it.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from tests.support.chart.helm import CHART, VALUE_SETS
from tools import chart_schema
from tools.chart_schema import NOT_IN_VALUES, definitions
from tools.configuration_doc import SERVICES, settings_of

SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def merged(under: Any, over: Any) -> Any:
    """Merge values as Helm does. Null removes a key."""
    if not (isinstance(under, dict) and isinstance(over, dict)):
        return over
    both = {**under, **{key: merged(under.get(key), value) for key, value in over.items()}}
    return {key: value for key, value in both.items() if value is not None}


def values(value_set: str = "") -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    if value_set:
        found = merged(found, yaml.safe_load((CHART / f"values-{value_set}.yaml").read_text()))
    return found


def problems(given: dict[str, Any]) -> list[str]:
    return [error.message for error in Draft7Validator(SCHEMA).iter_errors(given)]


def test_the_schema_has_the_settings_of_the_code() -> None:
    """If this fails, run `make docs` and commit deploy/helm/pdmesh/values.schema.json."""
    text = (CHART / "values.schema.json").read_text()
    assert chart_schema.document(text) == text


def test_every_setting_is_in_the_schema_or_set_by_the_chart() -> None:
    known = definitions()
    for service in SERVICES:
        name = "instance" if service in chart_schema.INSTANCES else service
        fields = {field.upper() for field in settings_of(service).model_fields}
        assert fields - NOT_IN_VALUES <= set(known[name]["properties"]), service
        assert not NOT_IN_VALUES & set(known[name]["properties"]), service


def test_a_setting_keeps_its_type_and_bounds() -> None:
    known = definitions()
    gateway = known["gateway"]["properties"]
    assert gateway["MAX_CALLS"]["type"] == "integer"
    assert gateway["MAX_CALLS"]["minimum"] == 1
    assert gateway["SCENARIOS"]["type"] == ["object", "string"]
    assert gateway["STRICT_FIELDS"]["type"] == "boolean"
    assert known["all"]["properties"]["LOG_LEVEL"]["enum"] == ["debug", "info", "warning", "error"]
    assert "MAX_CALLS" not in known["all"]["properties"]


@pytest.mark.parametrize("value_set", ["", *VALUE_SETS])
def test_the_chart_s_own_values_fit(value_set: str) -> None:
    assert problems(values(value_set)) == []


def test_every_value_of_the_chart_is_in_the_schema_and_an_unknown_one_is_refused_by_name() -> None:
    given = values()
    for path in (("gateway",), ("poolDefaults",), ("nats",), ("topology",), ()):
        changed = copy.deepcopy(given)
        place = changed
        for key in path:
            place = place[key]
        place["surplus"] = 1
        (problem,) = problems(changed)
        assert "'surplus' was unexpected" in problem
