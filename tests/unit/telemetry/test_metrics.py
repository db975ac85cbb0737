"""Counters and histograms are summed by their labels and shown at /metrics under Prometheus
names.
"""

from __future__ import annotations

import subprocess
import sys

from tests.support.otlp import OtlpCollector

_PROGRAM = """
from opentelemetry.sdk.resources import Resource
from pdmesh.telemetry import metrics

early = metrics.counter("test.early", "Made before configure")
early.add(2)
metrics.configure(Resource.create({}), None)
late = metrics.counter("test.late", "Made after configure")
late.add(1, {"role": "prefill", "outcome": "ok"})
late.add(3, {"outcome": "ok", "role": "prefill"})
late.add(5, {"outcome": "failed", "role": "prefill"})
metrics.render()
late.add(10, {"outcome": "failed", "role": "prefill"})
print(metrics.render().decode())
"""


def test_a_counter_sums_by_its_labels_in_any_order_and_keeps_counting_after_a_scrape() -> None:
    """The program runs in its own process, because a process has only one meter provider."""
    command = [sys.executable, "-c", _PROGRAM]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = shown.splitlines()
    assert 'test_late_total{outcome="ok",role="prefill"} 4.0' in lines
    assert 'test_late_total{outcome="failed",role="prefill"} 15.0' in lines
    assert any(line.startswith("test_early_total") and line.endswith(" 2.0") for line in lines)


_KNOWN = """
from opentelemetry.sdk.resources import Resource
from pdmesh.instance.legs import instruments
from pdmesh.services.master_scheduler.plans import upgrade_loop
from pdmesh.telemetry import metrics

metrics.configure(Resource.create({}), None)
print(metrics.render().decode())
"""


def test_what_an_alert_looks_at_by_single_counts_is_zero_before_the_first() -> None:
    """If a series begins with its first count, Prometheus's `increase` does not see that count."""
    command = [sys.executable, "-c", _KNOWN]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = shown.splitlines()
    assert 'pdmesh_upgrade_steps_total{step="turned_back"} 0.0' in lines
    faults = {line for line in lines if line.startswith("pdmesh_kv_tier_faults_total{")}
    told = {("file", "kv_tier_off"), ("file", "kv_tier_read_only"), ("peer", "kv_corrupt")}
    assert faults >= {
        f'pdmesh_kv_tier_faults_total{{pdmesh_reason="{reason}",tier="{tier}"}} 0.0'
        for tier, reason in told
    }


_EXPORT = """
import sys
from opentelemetry.sdk.resources import Resource
from pdmesh.telemetry import metrics

metrics.gauge("test.ready", "A yes", lambda: True)
metrics.gauge("test.share", "A part", lambda: [(0.5, {"role": "decode"})])
metrics.total("test.total", "A count", lambda: 7)
metrics.counter("test.counter", "Another").add(2)
metrics.histogram("test.times", "Times").record(0.1)
meters = metrics.configure(Resource.create({"service.name": "tested"}), sys.argv[1])
print(metrics.render().decode())
meters.shutdown()
"""


def test_every_kind_of_metric_reaches_a_collector() -> None:
    """A single boolean among the values once kept the exporter from sending anything."""
    collector = OtlpCollector()
    try:
        command = [sys.executable, "-W", "error", "-c", _EXPORT, collector.endpoint]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    finally:
        collector.close()
    arrived = {name: metric for (_, name), metric in collector.metrics.items()}
    none = frozenset[tuple[str, str]]()
    assert arrived["test.ready"].points == {none: 1}
    assert arrived["test.share"].points == {frozenset({("role", "decode")}): 0.5}
    assert arrived["test.counter"].points == {none: 2}
    assert arrived["test.times"].points == {none: 1}
    assert (arrived["test.total"].kind, arrived["test.total"].points) == (
        "sum",
        {none: 7},
    )
    assert "# TYPE test_total counter" in shown


_DISTRIBUTION = """
from opentelemetry.metrics import get_meter
from opentelemetry.sdk.resources import Resource
from pdmesh.telemetry import metrics

ours = metrics.histogram("test.ours", "Ours", buckets=[0.1, 1.0])
metrics.configure(Resource.create({}), None)
theirs = get_meter("theirs").create_histogram(
    "test.theirs", "s", "Theirs", explicit_bucket_boundaries_advisory=[0.1, 1.0]
)
for histogram in (ours, theirs):
    for value in (0.0, 0.1, 0.5, 1.0, 7.0):
        histogram.record(value, {"role": "decode"})
    histogram.record(0.25, {"role": "prefill"})
print(metrics.render().decode())
"""


def test_our_histograms_look_the_same_as_those_of_the_sdk() -> None:
    command = [sys.executable, "-c", _DISTRIBUTION]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ours = [line for line in shown.splitlines() if line.startswith("test_ours")]
    theirs = [line for line in shown.splitlines() if line.startswith("test_theirs")]
    assert ours == [line.replace("theirs", "ours") for line in theirs]
    assert 'test_ours_seconds_bucket{le="0.1",role="decode"} 2.0' in ours
    assert 'test_ours_seconds_count{role="prefill"} 1.0' in ours
