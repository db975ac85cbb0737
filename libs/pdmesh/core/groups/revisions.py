"""Decides which revision each group runs during an upgrade (S24).

A service is a model with its settings. A revision is a name for the service and the KV transport
that instances run. When an operator changes the service of a scenario, one group of the scenario
after another gets the new service. The registry keeps one `Upgrade` per scenario. An `Upgrade` has
the old service, the new service, and the groups that already run the new one. A new leading master
therefore continues the upgrade.
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
    settled: Service  # a rollback returns the groups to this service
    settled_version: int  # the last version of the desired state that asked for `settled`
    target: Service  # the service that the desired state asks for
    version: int  # the first version of the desired state that asked for `target`
    changed: Mapping[str, Service] = field(default_factory=dict)  # groups that do not run `settled`
    current: str = ""  # the group that is being changed, or is on trial after its change
    # If above 0, only the canary group runs `target`, until an operator promotes the upgrade.
    canary_share: float = 0.0
    back: str = ""  # why the upgrade rolls back, or empty while it goes forward
    outcome: str = ""  # why the last upgrade rolled back
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
        """The upgrade after this group has got the service of `goal`."""
        changed = {g: s for g, s in self.changed.items() if g != group_id}
        if self.goal != self.settled:
            changed[group_id] = self.goal
        return replace(self, changed=changed)


Upgrades = Mapping[str, Upgrade]  # by scenario


def canary_of(scenario: str) -> str:
    """The id of the scenario's canary: an extra, small group that tries a new revision first."""
    return f"{CANARY_PREFIX}{scenario}"


def is_canary(group_id: str) -> bool:
    return group_id.startswith(CANARY_PREFIX)


def with_canaries(desired: Desired, upgrades: Upgrades) -> Desired:
    """Add the canary groups to the desired state.

    For every role, a canary has its share of the scenario's instances, rounded up.
    """
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
    """The canary of a scenario whose groups are `own`.

    The canary may be in any rack of these groups. It is in their region, or in any region if the
    groups are in different regions.
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
    """The service that each group runs now. An upgrade has precedence over the desired state."""
    found: dict[str, Service] = {}
    for group_id, group in desired.groups.items():
        upgrade = upgrades.get(group.scenario)
        found[group_id] = (
            upgrade.service_of(group_id) if upgrade is not None else desired.service_of(group)
        )
    return found


class CanaryShare(Protocol):
    """The fields that `shares` reads. `Upgrade` and the message of an upgrade have these fields."""

    @property
    def scenario(self) -> str: ...
    @property
    def canary_share(self) -> float: ...
    @property
    def back(self) -> str: ...
    @property
    def outcome(self) -> str: ...


def shares(upgrades: Iterable[CanaryShare]) -> dict[str, float]:
    """The share of its scenario's requests that each canary group gets, 0..1.

    From the start of a rollback on, the share is 0, so the canary gets no requests while its
    instances leave.
    """
    return {
        canary_of(each.scenario): each.canary_share
        for each in upgrades
        if each.canary_share or each.back or each.outcome
    }


NO_UPGRADES: Final[Upgrades] = {}
