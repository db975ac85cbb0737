"""Histograms that take a microsecond per record, a quarter of the time of OpenTelemetry's own.

With thousands of requests per second and six records per request, this saves a few percent of the
mesh's CPU. The histograms keep their sums here. The readers of OpenTelemetry's SDK export them
together with the SDK's own metrics.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import export
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricsData,
    PeriodicExportingMetricReader,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from pdmesh.telemetry import labels as known_labels

_SCOPE: Final = InstrumentationScope("pdmesh")
_all: Final[list[Histogram]] = []


@dataclass(slots=True)
class _Series:
    """The values of one set of labels."""

    counts: list[int]  # the number of values by bucket
    sum: float = 0.0
    least: float = math.inf
    most: float = -math.inf


class Histogram:
    """Counts values in buckets. The first bucket has the values up to `bounds[0]`.

    A histogram takes no lock, so use it on one thread only.
    """

    def __init__(self, name: str, unit: str, help: str, bounds: Sequence[float]) -> None:
        self._name, self._unit, self._help = name, unit, help
        self._bounds = list(bounds)
        self._series: dict[frozenset[tuple[str, str]], _Series] = {}
        self._since_ns = time.time_ns()
        _all.append(self)

    def record(self, value: float, labels: Mapping[str, str] | None = None) -> None:
        key = frozenset(labels.items()) if labels else _NO_LABELS
        series = self._series.get(key)
        if series is None:
            known_labels.check(self._name, labels or ())
            series = self._series[key] = _Series([0] * (len(self._bounds) + 1))
        series.counts[bisect_left(self._bounds, value)] += 1
        series.sum += value
        if value < series.least:
            series.least = value
        if value > series.most:
            series.most = value

    def to_metric(self) -> Metric:
        """Convert to the SDK's type.

        This iterates over a copy of the series. A garbage collection may begin during the loop, and
        `GcWatch` then adds the pause to a histogram.
        """
        now_ns = time.time_ns()
        points = [
            HistogramDataPoint(
                attributes=dict(labels),
                start_time_unix_nano=self._since_ns,
                time_unix_nano=now_ns,
                count=sum(series.counts),
                sum=series.sum,
                bucket_counts=list(series.counts),
                explicit_bounds=self._bounds,
                min=series.least,
                max=series.most,
            )
            for labels, series in self._series.copy().items()
        ]
        data = export.Histogram(points, AggregationTemporality.CUMULATIVE)
        return Metric(self._name, self._help, self._unit, data)


_NO_LABELS: Final[frozenset[tuple[str, str]]] = frozenset()


class _WithOurs:
    """A mix-in for the SDK's readers that adds our histograms to the SDK's metrics."""

    resource: Resource

    # The types are Any because the SDK's own arguments are passed on unchanged.
    def _receive_metrics(self, metrics_data: MetricsData | None, *args: Any, **kwargs: Any) -> None:
        ours = [m for h in _all if (m := h.to_metric()).data.data_points]
        theirs = metrics_data.resource_metrics if metrics_data is not None else ()
        data = MetricsData(_merged(theirs, self.resource, ours))
        super()._receive_metrics(data, *args, **kwargs)  # type: ignore[misc]  # the reader's


def _merged(
    theirs: Sequence[ResourceMetrics], resource: Resource, ours: Sequence[Metric]
) -> list[ResourceMetrics]:
    """Merge our metrics with the SDK's, so that each resource and scope has one entry.

    In OTLP's encoder, a second entry for an equal resource or scope replaces the first one. Without
    this merge, all metrics of the SDK would be lost.
    """
    others = [each for each in theirs if each.resource != resource]
    same = [scope for each in theirs if each.resource == resource for scope in each.scope_metrics]
    metrics = [m for scope in same if scope.scope.name == _SCOPE.name for m in scope.metrics]
    scopes = [scope for scope in same if scope.scope.name != _SCOPE.name]
    scopes.append(ScopeMetrics(_SCOPE, [*metrics, *ours], ""))
    return [*others, ResourceMetrics(resource, scopes, "")]


class PrometheusReader(_WithOurs, PrometheusMetricReader):
    def __init__(self, resource: Resource) -> None:
        self.resource = resource
        super().__init__(scope_info_enabled=False)


class PeriodicReader(_WithOurs, PeriodicExportingMetricReader):
    def __init__(
        self, resource: Resource, exporter: MetricExporter, every_ms: float | None
    ) -> None:
        """If `every_ms` is None, OpenTelemetry's environment variable applies."""
        self.resource = resource
        super().__init__(exporter, every_ms)
