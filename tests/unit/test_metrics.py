"""Counters sum by labels and show at /metrics under their Prometheus names."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
from opentelemetry.sdk.resources import Resource
from pdmesh.telemetry import metrics

early = metrics.counter("pdmesh.test.early", "Made before configure")
early.add(2)
metrics.configure(Resource.create({}), None)
late = metrics.counter("pdmesh.test.late", "Made after configure")
late.add(1, {"role": "prefill", "outcome": "ok"})
late.add(3, {"outcome": "ok", "role": "prefill"})
late.add(5, {"outcome": "failed", "role": "prefill"})
metrics.render()
late.add(10, {"outcome": "failed", "role": "prefill"})
print(metrics.render().decode())
"""


def test_a_counter_sums_by_its_labels_in_any_order_and_goes_on_after_a_scrape() -> None:
    """In a process of its own, since a process has one meter provider."""
    command = [sys.executable, "-c", _PROGRAM]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = shown.splitlines()
    assert 'pdmesh_test_late_total{outcome="ok",role="prefill"} 4.0' in lines
    assert 'pdmesh_test_late_total{outcome="failed",role="prefill"} 15.0' in lines
    assert any(
        line.startswith("pdmesh_test_early_total") and line.endswith(" 2.0") for line in lines
    )
