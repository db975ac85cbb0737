"""Some metrics are also shown under vLLM's names, which vLLM must really have."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from prometheus_client import Metric, generate_latest

from pdmesh.telemetry import vllm_names
from pdmesh.telemetry.vllm_names import ALIASES, WithVllmNames
from tools.instruments import all_instruments

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/observe.md"


class Page:
    """A page of metrics with these samples.

    Each family has a kind and samples. The first item of a sample is the suffix of its name.
    """

    def __init__(self, **families: tuple[str, list[tuple[str, Mapping[str, str], float]]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for name, (kind, samples) in self._families.items():
            metric = Metric(name, "", kind)
            for suffix, labels, value in samples:
                metric.add_sample(name + suffix, dict(labels), value)
            yield metric


def aliases(page: Page) -> list[str]:
    lines = generate_latest(WithVllmNames(page)).decode().splitlines()
    return [line for line in lines if line.startswith("vllm:")]


@pytest.fixture(autouse=True)
def no_model_is_left() -> Iterator[None]:
    yield
    vllm_names.serve("")


def test_a_histogram_is_summed_over_the_labels_that_vllm_lacks() -> None:
    def of(operation: str, le: str) -> dict[str, str]:
        kind = {"gen_ai_operation_name": operation, "gen_ai_request_model": "m"}
        return kind | ({"le": le} if le else {})

    page = Page(
        gen_ai_server_time_to_first_token_seconds=(
            "histogram",
            [
                ("_bucket", of("chat", "0.1"), 1), ("_bucket", of("chat", "+Inf"), 2),
                ("_count", of("chat", ""), 2), ("_sum", of("chat", ""), 1.5),
                ("_bucket", of("text_completion", "0.1"), 3),
                ("_bucket", of("text_completion", "+Inf"), 3),
                ("_count", of("text_completion", ""), 3), ("_sum", of("text_completion", ""), 0.5),
            ],
        )
    )  # fmt: skip
    assert aliases(page) == [
        'vllm:time_to_first_token_seconds_bucket{le="0.1",model_name="m"} 4.0',
        'vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 5.0',
        'vllm:time_to_first_token_seconds_count{model_name="m"} 5.0',
        'vllm:time_to_first_token_seconds_sum{model_name="m"} 2.0',
    ]


def test_only_answered_requests_are_successes_and_have_a_latency() -> None:
    def call(outcome: str, reason: str) -> dict[str, str]:
        model = {"gen_ai_request_model": "m"}
        return model | {"pdmesh_outcome": outcome, "pdmesh_reason": reason}

    page = Page(
        pdmesh_requests=(
            "counter",
            [
                ("_total", call("completed", "stop"), 2),
                ("_total", call("failed", "UPSTREAM_FAILED"), 7),
                ("_total", call("completed", "length"), 3),
            ],
        ),
        gen_ai_server_request_duration_seconds=(
            "histogram",
            [
                ("_count", {"gen_ai_request_model": "m", "error_type": ""}, 5),
                ("_count", {"gen_ai_request_model": "m", "error_type": "UPSTREAM_FAILED"}, 7),
            ],
        ),
    )
    assert aliases(page) == [
        'vllm:request_success_total{finished_reason="stop",model_name="m"} 2.0',
        'vllm:request_success_total{finished_reason="length",model_name="m"} 3.0',
        'vllm:e2e_request_latency_seconds_count{model_name="m"} 5.0',
    ]


def test_an_instances_gauges_name_the_model_that_it_serves() -> None:
    page = Page(
        pdmesh_slots_used=("gauge", [("", {}, 3)]), pdmesh_kv_engine_usage=("gauge", [("", {}, 0)])
    )
    vllm_names.serve("m")
    assert aliases(page) == [
        'vllm:num_requests_running{model_name="m"} 3.0',
        'vllm:kv_cache_usage_perc{model_name="m"} 0.0',
    ]


def test_priorities_are_summed_and_a_family_without_samples_has_no_alias() -> None:
    page = Page(
        pdmesh_gateway_waiting=("gauge", [("", {"priority": "0"}, 2), ("", {"priority": "1"}, 5)]),
        pdmesh_requests=("counter", []),
    )
    assert aliases(page) == ["vllm:num_requests_waiting 7.0"]


def test_each_alias_is_made_of_a_metric_and_labels_of_the_code() -> None:
    known = {each.family: each for each in all_instruments(ROOT).values()}
    for alias in ALIASES:
        assert {*alias.labels, *alias.where} <= set(known[alias.family].labels), alias.name


def test_the_page_lists_exactly_the_aliases() -> None:
    rows = re.findall(r"^\| `(vllm:\w+)` \| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert rows == [(alias.name, alias.family) for alias in ALIASES]


def test_vllm_has_these_names() -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    source = Path(found.submodule_search_locations[0], "v1/metrics/loggers.py").read_text()
    names = set(re.findall(r'name="(vllm:\w+)"', source))
    assert {alias.name for alias in ALIASES} <= names
