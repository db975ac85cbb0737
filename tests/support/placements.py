"""Small fleets of instances, and plans for them. A plan ranks the instances for one request."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pdmesh.core.model import Role
from pdmesh.core.placement.baselines import POLICIES
from pdmesh.core.placement.fleet import (
    Fleet,
    InstanceRecorded,
    LoadReported,
)
from pdmesh.core.placement.instance import Identity
from pdmesh.core.placement.plan import Placement, Plan
from pdmesh.core.placement.policies import Query


def identity(name: str, role: Role, **changes: object) -> Identity:
    values: dict[str, object] = {
        "incarnation": 1, "group_id": "g0", "scenario": "default", "model": "m",
        "model_fingerprint": "f",
        "block_size": 64, "num_slots": 8, "num_kv_blocks": 1000, "max_model_len": 8192,
    }  # fmt: skip
    return Identity(instance_id=name, role=role, **(values | changes))  # type: ignore[arg-type]


def make(*identities: Identity, policy: str = "default", seed: int = 1) -> Placement:
    fleet = Fleet()
    for each in identities:
        fleet.handle(InstanceRecorded(each), now=0.0)
    return Placement(fleet, random.Random(seed), POLICIES[policy]())


def pair(**changes: object) -> list[Identity]:
    return [
        identity(f"{role.value}-{i}", role, **changes)
        for role in (Role.PREFILL, Role.DECODE)
        for i in (0, 1)
    ]


def planned(placement: Placement, query: Query, now: float = 0.0, **matches: int) -> Plan:
    named = {name.replace("_", "-"): n for name, n in matches.items()}
    plan = placement.plan(query, named, now)
    placement.fleet.check_invariants()
    assert isinstance(plan, Plan), plan
    return plan


def load(
    name: str, used: int = 0, free: int = 1000, slots: int = 8, admitted: Sequence[str] = ()
) -> LoadReported:
    return LoadReported(name, 1, slots, used, free, is_draining=False, admitted=admitted)


QUERY = Query(model="m", num_prompt_tokens=640, max_tokens=64, block_hashes=(b"x",) * 10)
