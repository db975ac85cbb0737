"""Tests which encoders a gateway asks to encode images for an instance that computes prompts."""

from __future__ import annotations

import pytest

from pdmesh.services.gateway.routing.fleet import FleetView, MeshView
from pdmesh.v1.common_pb2 import (
    INSTANCE_PHASE_READY,
    ROLE_ENCODER,
    ROLE_FUSION,
    ROLE_PREFILL,
    InstanceRecord,
    Role,
)
from tests.fakes.memory_registry import MemoryStore, MemoryView

pytestmark = pytest.mark.req("S130")


def record(name: str, role: Role.ValueType, **changes: bool) -> InstanceRecord:
    return InstanceRecord(
        instance_id=name,
        incarnation=1,
        role=role,
        phase=INSTANCE_PHASE_READY,
        group_id="seeing",
        model="m",
        **changes,  # type: ignore[arg-type]
    )


def asked_for(computes: InstanceRecord, *more: InstanceRecord) -> list[str]:
    store = MemoryStore()
    for each in (record("encoder", ROLE_ENCODER), computes, *more):
        store.records[each.instance_id] = each
    fleet = FleetView(MeshView(MemoryView(store)), "m", lambda: 0.0)
    return [r.instance_id for r in fleet.encoders(computes)]


@pytest.mark.parametrize("role", [ROLE_PREFILL, ROLE_FUSION])
async def test_only_an_instance_that_fetches_embeddings_gets_an_encoder(
    role: Role.ValueType,
) -> None:
    """An instance of an older release ends its session when it gets the unknown message about
    embeddings. All the gateway's legs there would be lost, and the deaths would count against the
    prompt.
    """
    assert asked_for(record("new", role, fetches_embeddings=True)) == ["encoder"]
    assert asked_for(record("old", role)) == []


async def test_an_encoder_serves_its_own_group_only() -> None:
    other = record("new", ROLE_PREFILL, fetches_embeddings=True)
    other.group_id = "other"
    assert asked_for(other) == []


@pytest.mark.fault("F34")
async def test_an_instance_gets_no_encoder_from_which_it_cannot_fetch() -> None:
    """Another encoder of the group encodes the images."""
    computes = record("new", ROLE_PREFILL, fetches_embeddings=True)
    other = record("other", ROLE_ENCODER)
    avoided = computes.avoided_encoders.add(instance_id="encoder", incarnation=1)
    assert asked_for(computes) == []
    assert asked_for(computes, other) == ["other"]
    avoided.incarnation = 2
    assert asked_for(computes, other) == ["encoder", "other"], "that was another incarnation"
