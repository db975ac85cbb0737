"""The events and effects of the upgrade controller (`controller.py`).

A scenario is a kind of requests with its own groups of instances. A revision names a version of
model, KV layout and transport. An upgrade gives the groups of a scenario a new revision, one group
after another. An extra group, the canary, may get the revision first, with a share of the requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pdmesh.core.groups.desired import Service, UpgradeLimits
from pdmesh.core.groups.revisions import Upgrade, Upgrades, is_canary
from pdmesh.core.model import Role
from pdmesh.core.upgrade.revision_health import GroupRevision, LegFailureReported, RequestAnswered


@dataclass(frozen=True, slots=True)
class GroupSeen:
    """A group's state after the last round of the group controller.

    `is_whole` means that the group is complete and serves. `busy` has the load of each role, 0..1,
    or None if it is unknown. `num_blank` is the number of blank instances, which have no role, that
    could join. `faulty` has the suspected and faulty instances of the group's revision, each with a
    reason.
    """

    group_id: str
    scenario: str
    revision: str
    counts: Mapping[Role, int]
    busy: Mapping[Role, float | None]
    is_whole: bool
    serves: bool
    num_blank: int = 0
    failure: str = ""
    detail: str = ""
    faulty: Mapping[str, str] = field(default_factory=dict)
    # Instances per data-parallel domain, if not 1.
    dp_sizes: Mapping[Role, int] = field(default_factory=dict)

    def dp_size(self, role: Role) -> int:
        return self.dp_sizes.get(role, 1)

    @property
    def num_instances(self) -> int:
        return sum(num * self.dp_size(role) for role, num in self.counts.items())

    @property
    def is_lacking(self) -> bool:
        """Whether the group is incomplete only because no blank instances are left."""
        return not (self.is_whole or self.failure or self.num_blank)


@dataclass(frozen=True, slots=True)
class GroupsObserved:
    """The input of a round: the desired state and the groups as they are.

    `targets` has the service that each scenario should run. `planning` has the scenarios in which
    planned moves of instances are changing groups. `gathering` is the subset of `planning` in which
    the moves only wait for instances.
    """

    version: int
    targets: Mapping[str, Service]
    upgrades: Upgrades
    groups: Mapping[str, GroupSeen]
    canary_share: float = 0.0  # the canary's share, given when the version was applied
    limits: Mapping[str, UpgradeLimits] = field(default_factory=dict)
    floors: Mapping[tuple[str, Role], int] = field(default_factory=dict)
    planning: frozenset[str] = frozenset()
    gathering: frozenset[str] = frozenset()
    lost_versions: frozenset[int] = frozenset()  # old desired states that cannot be restored
    _by_scenario: dict[str, list[GroupSeen]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        for _, group in sorted(self.groups.items()):
            if not is_canary(group.group_id):
                self._by_scenario.setdefault(group.scenario, []).append(group)

    def limits_of(self, scenario: str) -> UpgradeLimits:
        return self.limits.get(scenario, UpgradeLimits())

    def serving(self, scenario: str) -> list[GroupSeen]:
        """The scenario's groups without its canary."""
        return self._by_scenario.get(scenario, [])


@dataclass(frozen=True, slots=True)
class MemberLost:
    """An instance of this group and revision was lost or failed, and had no order to leave."""

    group_revision: GroupRevision
    instance_id: str


@dataclass(frozen=True, slots=True)
class Promoted:
    """An operator has ordered that all groups of the scenario get the canary's revision."""

    upgrade: Upgrade


@dataclass(frozen=True, slots=True)
class KeepRecord:
    upgrade: Upgrade


@dataclass(frozen=True, slots=True)
class DropRecord:
    """Delete the record of a scenario that has no groups any more."""

    scenario: str


@dataclass(frozen=True, slots=True)
class RestoreVersion:
    """Make the text of `version` the desired state again, unless `bad` is no longer current."""

    version: int
    bad: int
    reason: str


UpgradeStepKind = Literal[
    "begun", "changing", "promoted", "proved", "done", "back", "turned_back", "went_back"
]


@dataclass(frozen=True, slots=True)
class AnnounceUpgradeStep:
    """Announce a step of one group or, if `group_id` is empty, of the whole scenario."""

    scenario: str
    step: UpgradeStepKind
    version: int
    group_id: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class UpgradeReport:
    """The progress of an upgrade, for operators.

    `state` is canary, changing, watching, waiting, going back, stopped or went back.
    """

    scenario: str
    version: int
    state: str
    detail: str
    num_changed: int = 0
    num_groups: int = 0


Event = GroupsObserved | RequestAnswered | LegFailureReported | MemberLost | Promoted
Effect = KeepRecord | DropRecord | RestoreVersion | AnnounceUpgradeStep
