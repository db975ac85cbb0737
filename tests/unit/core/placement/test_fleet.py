"""The fleet's view of its instances, from events in any order."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdmesh.core.health.liveness import Health
from pdmesh.core.model import Role
from pdmesh.core.placement.fleet import (
    Fleet,
    HealthJudged,
    HealthMonitorLost,
    InstanceRecorded,
    InstanceUnrecorded,
    LoadReported,
    OutOfServiceSeen,
)
from tests.support.placements import QUERY, identity, make, pair, planned


@pytest.mark.parametrize(
    "spoil",
    [
        lambda f: f.handle(HealthJudged("prefill-0", 1, Health.SUSPECT), 0.0),
        lambda f: f.handle(
            InstanceRecorded(identity("prefill-0", Role.PREFILL, is_draining=True)), 0.0
        ),
        lambda f: f.handle(LoadReported("prefill-0", 1, 8, 0, 9, is_draining=True), 0.0),
        lambda f: f.handle(InstanceUnrecorded("prefill-0"), 0.0),
    ],
)
def test_only_healthy_admitting_instances_are_candidates(spoil: Callable[[Fleet], None]) -> None:
    placement = make(*pair())
    spoil(placement.fleet)
    plan = planned(placement, QUERY, prefill_0=10)
    assert [c.instance_id for c in plan.prefills] == ["prefill-1"]


def test_verdicts_on_another_incarnation_or_from_a_lost_health_monitor_do_not_count() -> None:
    placement = make(*pair())
    placement.fleet.handle(HealthJudged("prefill-0", 99, Health.DEAD), 0.0)
    placement.fleet.handle(HealthJudged("prefill-1", 1, Health.SUSPECT), 0.0)
    placement.fleet.handle(HealthMonitorLost(), 0.0)
    assert len(planned(placement, QUERY).prefills) == 2


def test_a_verdict_that_comes_before_the_record_counts() -> None:
    placement = make(*pair())
    placement.fleet.handle(HealthJudged("prefill-9", 1, Health.DEAD), 0.0)
    placement.fleet.handle(InstanceRecorded(identity("prefill-9", Role.PREFILL)), 0.0)
    assert len(planned(placement, QUERY).prefills) == 2


def test_an_instance_out_of_service_gets_no_requests_whatever_its_record_says() -> None:
    placement = make(*pair())
    fleet = placement.fleet
    fleet.handle(OutOfServiceSeen(frozenset({"prefill-0", "decode-0"})), 0.0)
    fleet.handle(InstanceRecorded(identity("prefill-0", Role.PREFILL, incarnation=2)), 0.0)
    plan = planned(placement, QUERY)
    assert [c.instance_id for c in (*plan.prefills, *plan.decodes)] == ["prefill-1", "decode-1"]
    fleet.handle(OutOfServiceSeen(frozenset()), 0.0)
    assert len(planned(placement, QUERY).prefills) == 2


def test_what_a_scenario_holds_is_the_most_that_one_of_its_usable_instances_holds() -> None:
    fleet = make(
        identity("prefill-0", Role.PREFILL),
        identity("prefill-1", Role.PREFILL),
        identity("prefill-2", Role.PREFILL, is_draining=True),
        identity("prefill-3", Role.PREFILL, scenario="long"),
    ).fleet
    matches = {"prefill-0": 3, "prefill-1": 5, "prefill-2": 9, "prefill-3": 2, "gone": 7}
    assert fleet.longest_by_scenario(matches) == {"default": 5, "long": 2}
