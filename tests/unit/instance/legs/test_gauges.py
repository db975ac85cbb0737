"""The metrics of an instance about its engine."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pdmesh.instance.legs import gauges
from pdmesh.instance.legs.host import InstanceHost


def host(**extra: float) -> Any:
    """Stands in for an `InstanceHost`. Only the statistics of its engine are read."""
    it = object.__new__(InstanceHost)
    it.engine = SimpleNamespace(stats=lambda: SimpleNamespace(extra=extra))
    return it


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    gauges.show(None)


@pytest.mark.req("S118")
def test_proposed_tokens_are_counted_by_scenario_and_outcome() -> None:
    gauges.show(host(num_proposals=10, num_proposed_tokens=40, num_accepted_tokens=25), "edits")
    assert list(gauges.proposals()) == [(10, {"pdmesh.scenario": "edits"})]
    assert {labels["pdmesh.outcome"]: n for n, labels in gauges.speculated()} == {
        "accepted": 25,
        "rejected": 15,
    }
    assert {labels["pdmesh.scenario"] for _, labels in gauges.speculated()} == {"edits"}


@pytest.mark.req("S118")
@pytest.mark.parametrize("extra", [{}, {"num_proposals": 0, "num_proposed_tokens": 0}])
def test_an_instance_that_never_proposes_shows_no_such_series(extra: dict[str, float]) -> None:
    gauges.show(host(**extra), "chat")
    assert list(gauges.proposals()) == list(gauges.speculated()) == []
    gauges.show(None)
    assert list(gauges.proposals()) == []


@pytest.mark.req("S139")
def test_the_parts_of_an_engines_steps_are_shown_if_it_times_them() -> None:
    parts = {"schedule_s": {"part": "schedule"}, "gap_s": {"part": "gap"}}
    assert list(gauges.engine_counts(parts)) == []
    gauges.show(host(num_kv_connections=3), "chat")
    assert list(gauges.engine_counts(parts)) == []
    gauges.show(host(schedule_s=1.5, gap_s=0.25), "chat")
    assert list(gauges.engine_counts(parts)) == [
        (1.5, {"part": "schedule"}),
        (0.25, {"part": "gap"}),
    ]
