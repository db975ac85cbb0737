"""The paths through instances that a gateway tries before it is ready."""

from __future__ import annotations

import pytest

from pdmesh.core.health.gateway_readiness import MAX_REFUSALS
from pdmesh.net.grpc.canary_call import CanaryFailed, CanaryRefused
from pdmesh.services.gateway import readiness
from pdmesh.services.gateway.readiness import PathProof
from pdmesh.services.gateway.routing.fleet import FleetView, MeshView
from pdmesh.v1.common_pb2 import (
    INSTANCE_PHASE_READY,
    ROLE_DECODE,
    ROLE_FUSION,
    ROLE_PREFILL,
    InstanceRecord,
    Role,
)
from tests.fakes.memory_registry import MemoryStore, MemoryView


def record(
    name: str, role: Role.ValueType, group_id: str = "g", *, is_draining: bool = False
) -> InstanceRecord:
    return InstanceRecord(
        instance_id=name,
        incarnation=1,
        role=role,
        group_id=group_id,
        phase=INSTANCE_PHASE_READY,
        grpc_address="127.0.0.1:1",
        model="m",
        is_draining=is_draining,
    )


def paths(*records: InstanceRecord) -> list[tuple[str, str]]:
    store = MemoryStore()
    store.records = {r.instance_id: r for r in records}
    fleet = FleetView(MeshView(MemoryView(store)), "", lambda: 0.0)
    return [(p.instance_id, d.instance_id if d else "") for p, d in fleet.paths()]


P0, P1 = (record(f"p{i}", ROLE_PREFILL) for i in (0, 1))
D0, D1 = (record(f"d{i}", ROLE_DECODE) for i in (0, 1))


def test_the_paths_are_all_compatible_pairs_and_consecutive_ones_share_no_instance() -> None:
    assert paths(P0, P1, D0, D1) == [("p0", "d0"), ("p1", "d1"), ("p0", "d1"), ("p1", "d0")]
    assert paths(P0, record("x", ROLE_DECODE, "other"), D1) == [("p0", "d1")]


def test_without_a_pair_each_instance_does_both_phases() -> None:
    assert paths(P0, P1) == [("p0", ""), ("p1", "")]
    assert paths(D0) == [("d0", "")]
    assert paths(record("f", ROLE_FUSION)) == [("f", "")]
    assert paths(record("f", ROLE_FUSION), P0, D0) == [("p0", "d0"), ("f", "")]
    assert paths(P0, record("x", ROLE_DECODE, is_draining=True)) == [("p0", "")]
    assert paths() == []


class Ways:
    """Stands in for the canary requests. It has the outcomes of the attempts in order."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self.outcomes, self.tried = list(outcomes), list[tuple[str, str]]()

    def canary(self, prefill: InstanceRecord, decode: InstanceRecord, *_: object) -> Ways:
        self.tried.append((prefill.instance_id, decode.instance_id))
        return self

    async def send(self) -> None:
        if (outcome := self.outcomes.pop(0)) is not None:
            raise outcome


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "_LOOK_S", 0.0)
    monkeypatch.setattr(readiness, "_AGAIN_S", 0.0)


async def proof_of(monkeypatch: pytest.MonkeyPatch, ways: Ways) -> PathProof:
    monkeypatch.setattr(readiness, "Canary", ways.canary)
    proof = PathProof(lambda: [(P0, D0), (P1, D1)], "gateway-0")
    await proof.run()
    return proof


async def test_one_successful_path_is_enough_and_after_a_failure_another_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ways = Ways(CanaryFailed("KV_TRANSFER_FAILED"), CanaryRefused(), None)
    assert (await proof_of(monkeypatch, ways)).is_given
    assert ways.tried == [("p0", "d0"), ("p1", "d1"), ("p0", "d0")]


async def test_a_mesh_that_refuses_because_it_is_full_counts_as_working(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a gateway that restarts under overload would never become ready."""
    ways = Ways(*[CanaryRefused()] * MAX_REFUSALS)
    assert (await proof_of(monkeypatch, ways)).is_given
    assert not ways.outcomes


async def test_a_failed_path_cancels_only_its_own_refusals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a full mesh, one broken instance once kept each new gateway from becoming ready."""
    full, broken = CanaryRefused(), CanaryFailed("UNAVAILABLE")
    most = MAX_REFUSALS
    ways = Ways(full, *[full, full] * 5, broken, *[full, broken] * (most - 6))
    assert (await proof_of(monkeypatch, ways)).is_given
    assert [p for p, _ in ways.tried].count("p0") == most
    assert ways.outcomes == [broken]
