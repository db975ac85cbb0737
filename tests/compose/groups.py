"""The groups and instances of a cluster, as its leading master reports them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.compose.cluster import Cluster


@dataclass(frozen=True)
class Groups:
    """The state of one group, and the cluster's blank instances.

    `members` has the sorted names of the members that serve, by role (`prefill`, `decode`). `out`
    has the reasons why instances are out of service, by name.
    """

    state: str
    members: dict[str, list[str]]
    blank: list[str]
    out: dict[str, str]

    def is_whole(self, prefill: int, decode: int) -> bool:
        counts = {role: len(names) for role, names in self.members.items()}
        return self.state == "serving" and counts == {"prefill": prefill, "decode": decode}

    @property
    def all_members(self) -> list[str]:
        return sorted(name for names in self.members.values() for name in names)


def groups(cluster: Cluster, group_id: str = "chat") -> Groups:
    """The group's current state. Fails if no master leads."""
    told: dict[str, Any] = json.loads(cluster.pdmesh("groups", "--json"))
    shown: list[dict[str, Any]] = told.get("groups", [])
    group = next((g for g in shown if g["group_id"] == group_id), dict[str, Any]())
    members: dict[str, list[str]] = {}
    for member in group.get("members", []):
        if member["phase"] == "INSTANCE_PHASE_READY":
            role = member["role"].removeprefix("ROLE_").lower()
            members.setdefault(role, []).append(member["instance_id"])
    return Groups(
        group.get("state", ""),
        {role: sorted(names) for role, names in members.items()},
        sorted(told.get("blank_instance_ids", [])),
        {o["instance_id"]: o["reason"] for o in told.get("out_of_service", [])},
    )


def faults(cluster: Cluster) -> dict[str, str]:
    """The reason of each instance's fault, by the instance's name. Others are left out."""
    told = json.loads(cluster.pdmesh("status", "--json"))
    return {row["id"]: row["fault"] for row in told["rows"] if row["fault"]}
