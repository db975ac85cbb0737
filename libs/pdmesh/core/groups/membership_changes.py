"""Finds the changes in the membership of groups, which are then announced (S13).

A group is a set of instances that may hand KV to each other and to no instance outside. At each
call, the tracker receives all present instances, and returns the groups that have changed since the
last call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pdmesh.core.health.liveness import Health
from pdmesh.core.model import Role
from pdmesh.core.placement.instance import Instance


@dataclass(frozen=True, slots=True)
class GroupChanged:
    """Announce these members of a group. If all lists are empty, the group is gone."""

    group_id: str
    scenario: str
    model: str
    prefill_ids: tuple[str, ...] = ()
    decode_ids: tuple[str, ...] = ()
    fusion_ids: tuple[str, ...] = ()
    pooling_ids: tuple[str, ...] = ()
    encoder_ids: tuple[str, ...] = ()


@dataclass(slots=True)
class GroupTracker:
    _announced: dict[str, GroupChanged] = field(default_factory=dict)

    @property
    def groups(self) -> list[GroupChanged]:
        return [self._announced[group_id] for group_id in sorted(self._announced)]

    def observe(self, instances: Iterable[Instance]) -> list[GroupChanged]:
        """The groups whose members changed since the last call.

        Draining instances are members, and dead instances are not.
        """
        present = _groups(instances)
        gone = [
            GroupChanged(group.group_id, group.scenario, group.model)
            for group_id, group in self._announced.items()
            if group_id not in present
        ]
        changed = [
            group for group_id, group in present.items() if self._announced.get(group_id) != group
        ]
        self._announced = present
        return sorted([*gone, *changed], key=lambda group: group.group_id)


def _groups(instances: Iterable[Instance]) -> dict[str, GroupChanged]:
    members: dict[str, list[Instance]] = {}
    for instance in instances:
        is_member = instance.identity.group_id and instance.identity.role is not Role.NONE
        if is_member and instance.health is not Health.DEAD:
            members.setdefault(instance.identity.group_id, []).append(instance)
    return {group_id: _group(group_id, members[group_id]) for group_id in sorted(members)}


def _group(group_id: str, members: list[Instance]) -> GroupChanged:
    def ids(role: Role) -> tuple[str, ...]:
        return tuple(sorted(m.identity.instance_id for m in members if m.identity.role is role))

    first = min(members, key=lambda member: member.identity.instance_id).identity
    return GroupChanged(
        group_id,
        first.scenario,
        first.model,
        ids(Role.PREFILL),
        ids(Role.DECODE),
        ids(Role.FUSION),
        ids(Role.POOLING),
        ids(Role.ENCODER),
    )
