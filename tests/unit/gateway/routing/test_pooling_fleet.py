"""A call for vectors is bound to one revision of its model, until the revision is gone."""

from __future__ import annotations

from typing import Any

from pdmesh.core.groups.revisions import canary_of
from pdmesh.core.model import PeerId
from pdmesh.core.placement.plan import DEFAULT_SCENARIO
from pdmesh.core.pooling.facts import PoolingFacts, PoolingTask
from pdmesh.net.convert.pooling_facts import pooling_to_proto
from pdmesh.services.gateway.routing.canary_shares import CanaryShares
from pdmesh.services.gateway.routing.out_of_service import OutOfServiceView
from pdmesh.services.gateway.routing.pooling_fleet import PoolingFleet, PoolingNeeds
from pdmesh.services.gateway.routing.served_models import ServedModels
from pdmesh.v1.common_pb2 import ROLE_POOLING, InstanceRecord

FACTS = PoolingFacts(frozenset({PoolingTask.EMBED}), 8)
CANARY = canary_of(DEFAULT_SCENARIO)


def record(name: str, fingerprint: str, facts: PoolingFacts = FACTS, **more: Any) -> InstanceRecord:
    return InstanceRecord(
        instance_id=name,
        incarnation=1,
        role=ROLE_POOLING,
        model="m",
        model_fingerprint=fingerprint,
        num_slots=4,
        pooling=pooling_to_proto(facts),
        **more,
    )


class Canaries(CanaryShares):
    turn = True

    def draw(self, scenario: str) -> tuple[str, bool] | None:
        return (CANARY, self.turn) if scenario == DEFAULT_SCENARIO else None


def fleet_of(*records: InstanceRecord, canaries: CanaryShares | None = None) -> PoolingFleet:
    found = PoolingFleet(
        OutOfServiceView(), canaries or CanaryShares(), ServedModels(), lambda: 0.0
    )
    found.see(records)
    return found


def idle(instance_id: str, incarnation: int) -> int:
    return 0


def pinned(fleet: PoolingFleet, busy: str = "") -> PoolingNeeds:
    needs = PoolingNeeds(fleet.model("m"), DEFAULT_SCENARIO)
    return fleet.pinned(needs, lambda i, _: int(i == busy))


def test_a_call_is_bound_to_the_revision_of_the_instance_that_is_asked_first() -> None:
    fleet = fleet_of(record("a", "old"), record("b", "new"), record("c", "new"))
    needs = pinned(fleet, busy="a")
    assert needs.model.fingerprint == "new"
    assert set(fleet.ranked(needs, (), idle)) == {PeerId("b", 1), PeerId("c", 1)}


def test_a_canary_gets_the_calls_that_are_its_turn() -> None:
    canaries = Canaries()
    records = record("a", "old"), record("b", "new", group_id=CANARY)
    fleet = fleet_of(*records, canaries=canaries)
    assert pinned(fleet, busy="b").model.fingerprint == "new"
    canaries.turn = False
    assert pinned(fleet, busy="a").model.fingerprint == "old"


def test_a_revision_is_gone_once_only_others_are_served() -> None:
    fleet = fleet_of(record("a", "old"))
    needs = pinned(fleet)
    assert not fleet.is_gone(needs)
    fleet.see([record("a", "old", is_draining=True), record("b", "new")])
    assert fleet.is_gone(needs)
    assert fleet.ranked(needs, (), idle) == []
    fleet.see([])
    assert not fleet.is_gone(needs), "it may come back"


def test_another_scenario_does_not_replace_a_revision() -> None:
    fleet = fleet_of(record("a", "old", scenario=DEFAULT_SCENARIO))
    needs = pinned(fleet)
    fleet.see([record("b", "new", scenario="search")])
    assert not fleet.is_gone(needs)


def test_a_revision_that_makes_other_numbers_is_another_model() -> None:
    """The size of the answer and the tokens were decided for the old revision."""
    fleet = fleet_of(record("a", "old"))
    needs = pinned(fleet)
    fleet.see([record("b", "new", PoolingFacts(FACTS.tasks, 16))])
    assert not fleet.is_gone(needs)
    assert fleet.pinned(needs, idle).model == needs.model
