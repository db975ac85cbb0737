"""What a gateway finds in its own copy of the registry."""

from __future__ import annotations

import pytest

from pdmesh.services.gateway.routing.fleet import FleetView
from pdmesh.v1.common_pb2 import (
    INSTANCE_PHASE_READY,
    ROLE_DECODE,
    ROLE_PREFILL,
    InstanceRecord,
)
from tests.fakes.memory_registry import MemoryStore, MemoryView


@pytest.mark.req("S4")
@pytest.mark.parametrize(
    ("scenario", "expected"), [("", ["any", "plain"]), ("chat", ["any", "chat"]), ("x", ["any"])]
)
def test_without_a_master_a_request_stays_in_its_scenario_too(
    scenario: str, expected: list[str]
) -> None:
    """No scenario is the one called default, not the instances of all."""
    store = MemoryStore()
    for name, serves in (("any", ""), ("chat", "chat"), ("plain", "default")):
        for role in (ROLE_PREFILL, ROLE_DECODE):
            instance_id = f"{name}-{role}"
            store.records[instance_id] = InstanceRecord(
                instance_id=instance_id,
                incarnation=1,
                role=role,
                phase=INSTANCE_PHASE_READY,
                scenario=serves,
                model="m",
            )
    fleet = FleetView(MemoryView(store), "m", lambda: 0.0)
    prefills, decodes = fleet.least_loaded("m", scenario, (), lambda i, n: 0)
    assert [c.instance_id.rpartition("-")[0] for c in prefills] == expected
    assert [c.instance_id.rpartition("-")[0] for c in decodes] == expected
