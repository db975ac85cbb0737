"""Only READY instances get requests, by the master's plans and by a gateway's own ranking (S19)."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.placement.baselines import POLICIES
from pdmesh.core.placement.fleet import Fleet, InstanceRecorded
from pdmesh.core.placement.plan import NoPlan, Placement, Plan
from pdmesh.core.placement.policies import Query
from pdmesh.net.registry import RecordChanged
from pdmesh.services.gateway.routing.fleet import FleetView as GatewayFleet
from pdmesh.services.gateway.routing.fleet import MeshView, Wanted, pair_of
from pdmesh.services.master_scheduler.placement.convert import identity_from
from pdmesh.v1.common_pb2 import (
    INSTANCE_PHASE_READY,
    ROLE_DECODE,
    ROLE_FUSION,
    ROLE_NONE,
    ROLE_PREFILL,
    InstancePhase,
    InstanceRecord,
)

pytestmark = pytest.mark.req("S19", "S36")


@st.composite
def meshes(draw: st.DrawFn) -> dict[str, InstanceRecord]:
    records = {}
    for n in range(draw(st.integers(1, 8))):
        records[f"i-{n}"] = InstanceRecord(
            instance_id=f"i-{n}",
            incarnation=1,
            service="instance",
            role=draw(st.sampled_from([ROLE_NONE, ROLE_PREFILL, ROLE_DECODE, ROLE_FUSION])),
            phase=draw(st.sampled_from(InstancePhase.values())),
            group_id="g0",
            scenario="default",
            model="m",
            model_fingerprint="f",
            revision=draw(st.sampled_from(["", "r1", "r2"])),
            block_size=16,
            num_slots=8,
            num_kv_blocks=1000,
            max_model_len=4096,
            grpc_address="127.0.0.1:1",
        )
    return records


class _View:
    is_connected = True

    def __init__(self, records: dict[str, InstanceRecord]) -> None:
        self._records = records

    @property
    def records(self) -> Mapping[str, InstanceRecord]:
        return self._records

    def on_change(self, callback: Callable[[RecordChanged], None]) -> None: ...

    async def close(self) -> None: ...


@given(meshes())
def test_a_gateway_names_only_ready_instances(records: dict[str, InstanceRecord]) -> None:
    fleet = GatewayFleet(MeshView(_View(records)), "m", lambda: 0.0)
    prefills, decodes = fleet.least_loaded(Wanted("m"), "default", (), lambda i, n: 0)
    ready = {i for i, r in records.items() if r.phase == INSTANCE_PHASE_READY}
    roles = {i: records[i].role for i in ready}
    if any(c.is_local and roles[c.instance_id] != ROLE_FUSION for c in prefills):
        assert decodes == [], "a prefill does both phases if there is no decode"
        assert len({roles[c.instance_id] for c in prefills}) == 1
    else:
        assert {c.instance_id for c in prefills} == {
            i for i, role in roles.items() if role in (ROLE_PREFILL, ROLE_FUSION)
        }
        assert {c.instance_id for c in decodes} == {i for i, r in roles.items() if r == ROLE_DECODE}
    assert {c.instance_id for c in (*prefills, *decodes)} <= ready
    for instance_id in records.keys() - ready:
        assert fleet.candidate(instance_id, 1, Wanted("m")) is None, "an older plan"


@given(meshes(), st.sampled_from(sorted(POLICIES)))
def test_a_master_plans_only_ready_instances(
    records: dict[str, InstanceRecord], policy: str
) -> None:
    fleet = Fleet()
    for record in records.values():
        if (identity := identity_from(record)) is not None:
            fleet.handle(InstanceRecorded(identity), 0.0)
    placement = Placement(fleet, random.Random(1), POLICIES[policy]())
    plan = placement.plan(Query("m", "default", num_prompt_tokens=100), {}, 0.0)
    if isinstance(plan, NoPlan):
        return
    assert isinstance(plan, Plan)
    for candidate in (*plan.prefills, *plan.decodes):
        assert records[candidate.instance_id].phase == INSTANCE_PHASE_READY
    revisions = {records[c.instance_id].revision for c in plan.prefills}
    assert all(records[c.instance_id].revision in revisions for c in plan.decodes)


@given(meshes())
@pytest.mark.req("S13", "S24")
def test_instances_of_different_revisions_are_never_a_pair(
    records: dict[str, InstanceRecord],
) -> None:
    for one in records.values():
        for other in records.values():
            assert (pair_of(one) == pair_of(other)) == (one.revision == other.revision)
            a, b = identity_from(one), identity_from(other)
            if a is not None and b is not None:
                assert (a.cell == b.cell) == (one.revision == other.revision)
