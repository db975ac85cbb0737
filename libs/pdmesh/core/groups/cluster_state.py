"""The input of the group controller: wanted groups, seen instances and given assignments.

The desired state says which groups of instances the mesh should have. Instances report their state
in records, and the controller gives them assignments. `Observed` has all of these for one round. A
blank instance has no role yet. A scenario is a kind of requests with its own groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from pdmesh.core.groups.desired import SERVING_ROLES, Desired, revision_of, wanted_by_role
from pdmesh.core.groups.revisions import (
    NO_UPGRADES,
    Upgrades,
    services,
    with_canaries,
)
from pdmesh.core.model import (
    Assignment,
    DomainRank,
    PeerId,
    Phase,
    Role,
    RoleSpec,
)
from pdmesh.core.moves.move_refusal import MIN_PER_SCENARIO

NONE_LENT: Final[Mapping[str, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class WantedGroup:
    group_id: str
    scenario: str
    counts: Mapping[Role, int]
    role_specs: Mapping[Role, RoleSpec]
    # The regions that the group may be in, the preferred one first. Empty means any single region.
    regions: tuple[str, ...] = ()
    spans_regions: bool = False  # the group's instances may be in several regions at once
    region: str | None = None  # the region it should be in now (`region.py`). None means any.
    racks: tuple[str, ...] = ()  # the racks that its instances may be in. Empty means any.
    dp_sizes: Mapping[Role, int] = field(default_factory=dict)  # instances per member, if not 1

    def dp_size(self, role: Role) -> int:
        """How many instances form one member of this role: the ranks of a domain, or 1."""
        return self.dp_sizes.get(role, 1)

    @property
    def num_instances(self) -> int:
        return sum(num * self.dp_size(role) for role, num in self.counts.items())

    @property
    def revision(self) -> str:
        return next(iter(self.role_specs.values())).revision

    @property
    def size(self) -> int:
        """The number of members. A data-parallel domain is one member."""
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class WantedGroups:
    """All wanted groups, and limits for the controller's own changes (S28, S31).

    `floors` has the number of members that the controller must leave in service, by scenario and
    role. `num_lent` has the number of blank instances that are kept for the pools that have
    borrowed groups, by region. An empty key stands for any region.
    """

    groups: Mapping[str, WantedGroup] = field(default_factory=dict)
    floors: Mapping[tuple[str, Role], int] = field(default_factory=dict)
    num_lent: Mapping[str, int] = field(default_factory=dict)

    def floor(self, scenario: str, role: Role) -> int:
        return self.floors.get((scenario, role), 0)


def wanted_of(
    desired: Desired,
    kv_transport: str,
    num_lent: Mapping[str, int] = NONE_LENT,
    upgrades: Upgrades = NO_UPGRADES,
) -> WantedGroups:
    """The wanted groups and limits that follow from the desired state and its upgrades.

    `kv_transport` is the version of the KV wire format. Instances whose versions differ exchange no
    KV.
    """
    groups: dict[str, WantedGroup] = {}
    with_all = with_canaries(desired, upgrades)
    running = services(with_all, upgrades)
    revisions: dict[int, str] = {}  # by the id() of the service, which many groups share
    for group_id, group in with_all.groups.items():
        service = running[group_id]
        revision = revisions.get(id(service))
        if revision is None:
            revision = revisions[id(service)] = revision_of(service, kv_transport)
        role_specs = {
            role: RoleSpec(
                role=role,
                group_id=group_id,
                scenario=group.scenario,
                revision=revision,
                model=service.model,
                model_dir=service.model_dir,
                manifest=service.manifests.get(role, ""),
                options=tuple(sorted(service.options_for(role).items())),
                spans_regions=group.spans_regions,
            )
            for role in SERVING_ROLES
        }
        counts = {role: group.num(role) for role in SERVING_ROLES}
        groups[group_id] = WantedGroup(
            group_id,
            group.scenario,
            counts,
            role_specs,
            group.regions,
            group.spans_regions,
            racks=group.racks,
            dp_sizes=service.dp_size,
        )
    floors: dict[tuple[str, Role], int] = {}
    for scenario, own in desired.groups_by_scenario().items():
        for role, wanted in wanted_by_role(own.values()).items():
            least = 1 if desired.allows_single(scenario) else MIN_PER_SCENARIO
            floors[scenario, role] = min(least, wanted)
    return WantedGroups(groups, floors, num_lent)


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """One instance as its record in the registry describes it.

    If `assignment_id` is 0, the instance has no role, or one from its own settings.
    """

    instance_id: str
    incarnation: int
    phase: Phase
    role: Role = Role.NONE
    group_id: str = ""
    scenario: str = ""
    revision: str = ""
    assignment_id: int = 0
    region: str = ""
    rack: str = ""
    kv_region: str = ""  # the region that its KV stays in, or empty if its group spans regions
    kv_addresses: tuple[str, ...] = ()
    verified: frozenset[PeerId] = frozenset()
    failed: frozenset[PeerId] = frozenset()
    failure: str = ""
    num_slots_used: int = 0
    node_id: str = ""
    domain: DomainRank | None = None  # None if the instance computes alone
    domain_address: str = ""  # if it becomes rank 0 of a domain, the other ranks connect here

    @property
    def id(self) -> PeerId:
        return PeerId(self.instance_id, self.incarnation)

    @property
    def is_loaded(self) -> bool:
        return Phase.LOADED <= self.phase <= Phase.DRAINED


@dataclass(frozen=True, slots=True)
class Observed:
    """The content of the registry at the beginning of a round.

    `version` is the version of the desired state, or 0 if none was ever applied. Instances that are
    out of service (cordoned by an operator, or ejected for a fault) are either in `to_drain` or in
    `out_at_once`. Those in `out_at_once` become blank without draining.

    `domains.folding` fills `domains` and `lost_ranks` when it puts one instance in place of each
    data-parallel domain. `domains` has the ranks of each complete domain, in order. `lost_ranks`
    has the lost instances of each broken domain.
    """

    epoch: int
    version: int
    wanted: WantedGroups
    seen: Mapping[str, InstanceStatus]
    given: Mapping[str, Assignment]
    to_drain: frozenset[str] = frozenset()
    out_at_once: frozenset[str] = frozenset()
    domains: Mapping[str, tuple[InstanceStatus, ...]] = field(default_factory=dict)
    lost_ranks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
