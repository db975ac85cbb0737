"""A group is announced once at each change of its members."""

from __future__ import annotations

from pdmesh.core.groups.membership_changes import GroupChanged, GroupTracker
from pdmesh.core.health.liveness import Health
from pdmesh.core.model import Role
from pdmesh.core.placement.fleet import (
    Fleet,
    HealthJudged,
    InstanceRecorded,
    InstanceUnrecorded,
)
from pdmesh.core.placement.instance import Identity


def identity(name: str, role: Role, **changes: object) -> Identity:
    values: dict[str, object] = {
        "incarnation": 1, "group_id": "g0", "scenario": "default", "model": "m",
        "model_fingerprint": "f",
        "block_size": 64, "num_slots": 8, "num_kv_blocks": 1000, "max_model_len": 8192,
    }  # fmt: skip
    return Identity(instance_id=name, role=role, **(values | changes))  # type: ignore[arg-type]


def pair(**changes: object) -> list[Identity]:
    return [
        identity(f"{role.value}-{i}", role, **changes)
        for role in (Role.PREFILL, Role.DECODE)
        for i in (0, 1)
    ]


def test_groups_are_announced_when_their_members_change_and_once_more_when_gone() -> None:
    fleet, tracker = Fleet(), GroupTracker()
    for each in pair():
        fleet.handle(InstanceRecorded(each), now=0.0)
    whole = GroupChanged("g0", "default", "m", ("prefill-0", "prefill-1"), ("decode-0", "decode-1"))
    assert tracker.observe(fleet.instances.values()) == [whole]
    assert tracker.observe(fleet.instances.values()) == []
    fleet.handle(HealthJudged("decode-0", 1, Health.DEAD), now=0.0)
    assert tracker.observe(fleet.instances.values())[0].decode_ids == ("decode-1",)
    for each in pair():
        fleet.handle(InstanceUnrecorded(each.instance_id), now=0.0)
    assert tracker.observe(fleet.instances.values()) == [GroupChanged("g0", "default", "m")]
    assert tracker.groups == []
