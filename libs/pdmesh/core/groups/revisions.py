"""Decides what each group runs while the desired state asks for another revision (S24).

The record is kept in the registry beside the desired state. It says with which service the groups
of a scenario have proved themselves, which one they should get, and which groups have it already.
So a new service reaches a group only when its turn comes, and the next leader continues from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from pdmesh.core.groups.desired import (
    CANARY_PREFIX,
    Desired,
    Group,
    Service,
)
from pdmesh.core.model import Role


@dataclass(frozen=True, slots=True)
class Upgrade:
    """The upgrade of one scenario.

    Between two upgrades, `target` equals `settled` and `changed` is empty.
    """

    scenario: str
    settled: Service  # what its groups go back to
    settled_version: int  # the last version of the desired state that asked for it
    target: Service  # what the desired state asks for
    version: int  # the first version of the desired state that asked for the target
    changed: Mapping[str, Service] = field(default_factory=dict)  # groups that do not run `settled`
    current: str = ""  # the group that is being changed, or is on trial after it
    canary_share: float = 0.0  # above 0: only the canary group has the target, until promoted
    back: str = ""  # why it rolls back; empty: it goes forward
    outcome: str = ""  # why the last one rolled back
    is_proved: bool = False  # a complete group once served with `settled`

    def service_of(self, group_id: str) -> Service:
        if is_canary(group_id):
            return self.target
        return self.changed.get(group_id, self.settled)

    @property
    def goal(self) -> Service:
        return self.settled if self.back else self.target

    @property
    def is_idle(self) -> bool:
        return self.target == self.settled and not (self.changed or self.current or self.back)

    def moved(self, group_id: str) -> Upgrade:
        """The upgrade with this group at the goal."""
        changed = {g: s for g, s in self.changed.items() if g != group_id}
        if self.goal != self.settled:
            changed[group_id] = self.goal
        return replace(self, changed=changed)


Upgrades = Mapping[str, Upgrade]  # by scenario


def canary_of(scenario: str) -> str:
    """The canary's group: a small one beside the groups that serve."""
    return f"{CANARY_PREFIX}{scenario}"


def is_canary(group_id: str) -> bool:
    return group_id.startswith(CANARY_PREFIX)


def with_canaries(desired: Desired, upgrades: Upgrades) -> Desired:
    """The desired state with the canaries' groups. Each has its share of every role, rounded up."""
    tried = [each for _, each in sorted(upgrades.items()) if each.canary_share]
    if not tried:
        return desired
    by_scenario = desired.groups_by_scenario()
    canaries = {
        canary_of(each.scenario): _canary(list(own.values()), each)
        for each in tried
        if (own := by_scenario.get(each.scenario))
    }
    return replace(desired, groups={**desired.groups, **canaries})


def _canary(own: Sequence[Group], upgrade: Upgrade) -> Group:
    """`own`: the scenario's groups. The canary may be in any of their racks.

    It is in their region, or in any region if theirs differ.
    """

    def num(role: Role) -> int:
        return math.ceil(sum(group.num(role) for group in own) * upgrade.canary_share)

    is_alike = len({(g.region, g.failover, g.spans_regions) for g in own}) == 1
    are_in_racks = all(group.racks for group in own)
    racks = dict.fromkeys(rack for group in own for rack in group.racks) if are_in_racks else {}
    return replace(
        own[0] if is_alike else Group(upgrade.scenario),
        prefill=num(Role.PREFILL),
        decode=num(Role.DECODE),
        fusion=num(Role.FUSION),
        pooling=num(Role.POOLING),
        encoder=num(Role.ENCODER),
        racks=tuple(racks),
    )


def services(desired: Desired, upgrades: Upgrades) -> dict[str, Service]:
    """What each group runs now: what its upgrade says, or else the desired state."""
    found: dict[str, Service] = {}
    for group_id, group in desired.groups.items():
        upgrade = upgrades.get(group.scenario)
        found[group_id] = (
            upgrade.service_of(group_id) if upgrade is not None else desired.service_of(group)
        )
    return found


class CanaryShare(Protocol):
    """What `shares` needs of an `Upgrade`; the message that carries an upgrade has it, too."""

    @property
    def scenario(self) -> str: ...
    @property
    def canary_share(self) -> float: ...
    @property
    def back(self) -> str: ...
    @property
    def outcome(self) -> str: ...


def shares(upgrades: Iterable[CanaryShare]) -> dict[str, float]:
    """The share of the scenario's requests that each canary group gets.

    A canary that was rolled back gets no requests while its instances leave.
    """
    return {
        canary_of(each.scenario): each.canary_share
        for each in upgrades
        if each.canary_share or each.back or each.outcome
    }


NO_UPGRADES: Final[Upgrades] = {}
