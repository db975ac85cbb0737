"""The gauges of a master-scheduler: the size and age of its data, and the waiting requests."""

from __future__ import annotations

import time

from pdmesh.core.kv.prefix.prefix_index import PrefixIndex
from pdmesh.core.placement.fleet import Fleet
from pdmesh.core.request.backpressure import Backpressure
from pdmesh.kv.index.feed import IndexFeed
from pdmesh.net.registry import RegistryView
from pdmesh.telemetry import metrics, names


def observe_registry(view: RegistryView) -> None:
    connected_at = time.monotonic()

    def age_s() -> float:
        nonlocal connected_at
        if view.is_connected:
            connected_at = time.monotonic()
        return time.monotonic() - connected_at

    metrics.gauge(names.VIEW_AGE, "Upper bound of the registry view's age", age_s, "s")
    metrics.gauge(names.REGISTRY_RECORDS, "Records in the registry view", lambda: len(view.records))


def observe_fleet(fleet: Fleet) -> None:
    def load_age_s() -> float:
        """The age of the oldest report of a busy instance.

        An instance reports its load at least every second, and at once when the load has changed.
        """
        now = time.monotonic()
        busy = [i for i in list(fleet.instances.values()) if i.num_slots_used]
        return max((now - i.reported_at for i in busy if i.reported_at is not None), default=0.0)

    metrics.gauge(
        names.FLEET_INSTANCES,
        "Instances that can be candidates of a plan",
        lambda: sum(i.is_usable for i in fleet.instances.values()),
    )
    metrics.gauge(
        names.LOAD_AGE, "Age of the oldest load report of a busy instance", load_age_s, "s"
    )
    metrics.gauge(
        names.BOOKINGS,
        "Placed requests that no load report includes yet",
        lambda: len(fleet.reservations),
    )
    fits = fleet.predictor.fits
    metrics.gauge(
        names.PREDICTION_ERROR,
        "Recent mean relative error of predicted prefill times, by kind of instance",
        lambda: [(fit.error, {"kind": kind}) for kind, fit in list(fits())],
    )
    metrics.gauge(
        names.PREDICTION_OBSERVED,
        "Prefills that the predictor has learned from, by kind of instance",
        lambda: [(fit.num_observed, {"kind": kind}) for kind, fit in list(fits())],
    )


def observe_backpressure(backpressure: Backpressure) -> None:
    book = backpressure.book

    def waiting() -> list[tuple[float, dict[str, str]]]:
        now = time.monotonic()
        return [(sum(book.waiting(s, now).values()), {"scenario": s}) for s in book.scenarios()]

    metrics.gauge(
        names.SCENARIO_WAITING, "Requests that wait for a prefill, at all gateways", waiting
    )


def observe_index(index: PrefixIndex, feed: IndexFeed) -> None:
    metrics.gauge(
        names.INDEX_BLOCKS, "Blocks indexed, over all instances", lambda: index.num_blocks
    )
    metrics.total(
        names.INDEX_EVICTED, "Entries dropped for lack of room", lambda: index.num_evicted
    )
    metrics.gauge(
        names.INDEX_AGE,
        "How long the worst instance has had missing deltas; 0: none are missing",
        feed.age_s,
        "s",
    )
