"""Counters, histograms and gauges, which /metrics shows and OTLP exports, if configured.

Make instruments at import time, with names from `names.py`. Nothing is exported before `configure`.
Each label has a bounded set of values, so a request id must not be a label.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.resources import Resource
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from prometheus_client.registry import Collector

from pdmesh.telemetry import labels as known_labels
from pdmesh.telemetry.histograms import Histogram, PeriodicReader, PrometheusReader
from pdmesh.telemetry.vllm_names import WithVllmNames

Labels = Mapping[str, str]
# The default buckets, from 1 ms for a token in a batch to 2 min for a long prompt.
SECONDS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_EXPORT_EVERY_MS: Final = 15_000
_EXPORT_INTERVAL: Final = "OTEL_METRIC_EXPORT_INTERVAL"  # OpenTelemetry's own setting, in ms

# Returns the value of a gauge or a total: one number, or numbers with labels.
Read = Callable[[], float | Iterable[tuple[float, Labels]]]

_NO_LABELS: Final[Labels] = MappingProxyType({})
_NO_KEY: Final[frozenset[tuple[str, str]]] = frozenset()

_meter = metrics.get_meter("pdmesh")


class _Page:
    """The metrics that `render` shows."""

    source: Collector = REGISTRY


def configure(
    resource: Resource, otlp_endpoint: str | None, *, has_vllm_names: bool = False
) -> MeterProvider:
    """Begin to export. Call `shutdown()` on the result at the end.

    With `has_vllm_names`, /metrics shows some metrics also under vLLM's names. OTLP does not.
    """
    _Page.source = WithVllmNames(REGISTRY) if has_vllm_names else REGISTRY
    readers: list[MetricReader] = [PrometheusReader(resource)]
    if otlp_endpoint:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import (  # optional and slow
            OTLPMetricExporter,
        )

        exporter = OTLPMetricExporter(endpoint=f"{otlp_endpoint.rstrip('/')}/v1/metrics")
        every_ms = None if os.environ.get(_EXPORT_INTERVAL) else _EXPORT_EVERY_MS
        readers.append(PeriodicReader(resource, exporter, every_ms))
    provider = MeterProvider(
        metric_readers=readers,
        resource=resource,
        shutdown_on_exit=False,
        # Nothing uses exemplars, and they would cost time for each record.
        exemplar_filter=AlwaysOffExemplarFilter(),
    )
    metrics.set_meter_provider(provider)
    return provider


class Counter:
    """A count that only grows: `.add(1, {label: value})`.

    A counter takes no lock, so use it on one thread only. It adds to a dict, which the SDK reads at
    each export. This takes a fifth of the CPU time of the SDK's own counter. At thousands of
    requests per second, the difference is a few percent of a core.

    A counter without labels starts at 0, and so does each series of the `known` labels. If a series
    began with its first count, a rate would miss this count.
    """

    def __init__(self, name: str, help: str, unit: str, known: Iterable[Labels] = ()) -> None:
        self._name = name
        self._sums: dict[frozenset[tuple[str, str]], float] = {}
        for labels in known if known_labels.labels_of(name) else (_NO_LABELS,):
            self.add(0, labels)
        _meter.create_observable_counter(name, [self._observe], unit, help)

    def add(self, amount: float, labels: Labels = _NO_LABELS) -> None:
        key = frozenset(labels.items()) if labels else _NO_KEY
        if (sum_now := self._sums.get(key)) is None:
            known_labels.check(self._name, labels)
            sum_now = 0
        self._sums[key] = sum_now + amount

    def _observe(self, _: CallbackOptions) -> Iterable[Observation]:
        return [Observation(total, dict(key)) for key, total in list(self._sums.items())]


def counter(name: str, help: str, unit: str = "1", *, known: Iterable[Labels] = ()) -> Counter:
    """Make a counter. Series of `known` labels start at 0, so that a rate has their first count."""
    return Counter(name, help, unit, known)


def histogram(
    name: str, help: str, unit: str = "s", buckets: Sequence[float] = SECONDS
) -> Histogram:
    """Make a distribution of values: `.record(value, {label: value})`."""
    return Histogram(name, unit, help, buckets)


def gauge(name: str, help: str, read: Read, unit: str = "1") -> None:
    """Make a value that goes up and down. `read` returns the value at each export.

    `read` must not change any state, because it runs on the event loop for /metrics, and on the
    exporter's thread for OTLP.
    """
    _meter.create_observable_gauge(name, [_observer(name, read)], unit, help)


def total(name: str, help: str, read: Read, unit: str = "1") -> None:
    """Make a count that only grows. `read` returns the count at each export, as for a gauge."""
    _meter.create_observable_counter(name, [_observer(name, read)], unit, help)


def _observer(name: str, read: Read) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(_: CallbackOptions) -> Iterable[Observation]:
        value = read()
        if isinstance(value, int | float):
            return [Observation(_number(value))]
        observed = []
        for each, labels in value:
            known_labels.check(name, labels)
            observed.append(Observation(_number(each), dict(labels)))
        return observed

    return observe


def _number(value: float) -> float:
    """Convert a boolean to a number. A boolean would make OTLP's exporter drop all metrics."""
    return int(value) if isinstance(value, bool) else value


def render() -> bytes:
    """All metrics of this process as Prometheus text, including those of libraries."""
    return generate_latest(_Page.source)
