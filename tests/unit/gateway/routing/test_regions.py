"""The region to which a gateway sends requests while no master answers."""

from __future__ import annotations

import pytest

from pdmesh.services.gateway.routing.fleet import FleetView as GatewayFleet
from pdmesh.services.gateway.routing.fleet import MeshView, Wanted, pair_of
from pdmesh.v1.common_pb2 import (
    INSTANCE_PHASE_READY,
    ROLE_DECODE,
    ROLE_PREFILL,
    InstanceRecord,
)
from tests.fakes.memory_registry import MemoryStore, MemoryView

pytestmark = pytest.mark.req("S58")


async def test_a_gateway_without_a_master_asks_its_own_region_first() -> None:
    store = MemoryStore()
    for region in ("eu", "us"):
        for name, role in (("prefill", ROLE_PREFILL), ("decode", ROLE_DECODE)):
            store.records[f"{region}-{name}"] = InstanceRecord(
                instance_id=f"{region}-{name}",
                incarnation=1,
                role=role,
                phase=INSTANCE_PHASE_READY,
                group_id=f"chat-{region}",
                model="m",
                kv_region=region,
            )
    fleet = GatewayFleet(MeshView(MemoryView(store)), "m", lambda: 0.0, region="us")
    prefills, decodes = fleet.least_loaded(Wanted("m"), "", (), lambda i, n: 5 * i.startswith("us"))
    assert [c.instance_id for c in prefills] == ["us-prefill", "eu-prefill"]
    assert [c.instance_id for c in decodes] == ["us-decode", "eu-decode"]
    assert prefills[0].pair == decodes[0].pair != decodes[1].pair
    mixed = store.records["eu-decode"]
    mixed.group_id = "chat-us"
    assert pair_of(mixed) != pair_of(store.records["us-prefill"])
