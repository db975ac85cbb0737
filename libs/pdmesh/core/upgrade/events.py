"""What happens to an upgrade (events) and what must be done (effects); see `controller.py`."""

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
    """A group as the group controller has it.

    `busy`: the share of a role's slots that is taken; None: not known. `faulty`: instances of its
    revision that are suspected or faulty. `num_blank`: blank instances that could join it.
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
    dp_sizes: Mapping[Role, int] = field(default_factory=dict)  # instances per member, if not 1

    def dp_size(self, role: Role) -> int:
        return self.dp_sizes.get(role, 1)

    @property
    def num_instances(self) -> int:
        return sum(num * self.dp_size(role) for role, num in self.counts.items())

    @property
    def is_lacking(self) -> bool:
        """Whether it is incomplete only for lack of instances."""
        return not (self.is_whole or self.failure or self.num_blank)


@dataclass(frozen=True, slots=True)
class GroupsObserved:
    """What the desired state asks for, and what is there.

    `targets`: each scenario's service. `planning`: scenarios in which a plan is under way;
    `gathering`: the scenarios among them whose plan only waits for instances.
    """

    version: int
    targets: Mapping[str, Service]
    upgrades: Upgrades
    groups: Mapping[str, GroupSeen]
    canary_share: float = 0.0  # the share with which the version was applied
    limits: Mapping[str, UpgradeLimits] = field(default_factory=dict)
    floors: Mapping[tuple[str, Role], int] = field(default_factory=dict)
    planning: frozenset[str] = frozenset()
    gathering: frozenset[str] = frozenset()
    lost_versions: frozenset[int] = frozenset()  # of the desired state: not restorable
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
    """An instance of this revision was lost or failed and was not asked to leave."""

    group_revision: GroupRevision
    instance_id: str


@dataclass(frozen=True, slots=True)
class Promoted:
    """All groups of the scenario should get the canary's revision."""

    upgrade: Upgrade


@dataclass(frozen=True, slots=True)
class KeepRecord:
    upgrade: Upgrade


@dataclass(frozen=True, slots=True)
class DropRecord:
    """The scenario has no groups any more."""

    scenario: str


@dataclass(frozen=True, slots=True)
class RestoreVersion:
    """Make the text of `version` the desired state again, if `bad` is current."""

    version: int
    bad: int
    reason: str


UpgradeStepKind = Literal[
    "begun", "changing", "promoted", "proved", "done", "back", "turned_back", "went_back"
]


@dataclass(frozen=True, slots=True)
class AnnounceUpgradeStep:
    """Announce this step. `group_id` empty: it is about the whole scenario."""

    scenario: str
    step: UpgradeStepKind
    version: int
    group_id: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class UpgradeReport:
    """How far an upgrade is, for people.

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
