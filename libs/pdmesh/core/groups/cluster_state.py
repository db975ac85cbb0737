"""What the group controller compares: groups as wanted, instances as seen, assignments as given."""

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
    regions: tuple[str, ...] = ()  # where it may be, the preferred first; empty: in any single one
    spans_regions: bool = False  # its instances may be in several regions at once
    region: str | None = None  # where it should be now (`region.py`); None: in any
    racks: tuple[str, ...] = ()  # where its instances may be; empty: anywhere
    dp_sizes: Mapping[Role, int] = field(default_factory=dict)  # instances per member, if not 1

    def dp_size(self, role: Role) -> int:
        """How many instances are one member of this role: the ranks of a domain, or 1."""
        return self.dp_sizes.get(role, 1)

    @property
    def num_instances(self) -> int:
        return sum(num * self.dp_size(role) for role, num in self.counts.items())

    @property
    def revision(self) -> str:
        return next(iter(self.role_specs.values())).revision

    @property
    def size(self) -> int:
        """The number of its members: a domain is one."""
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class WantedGroups:
    """All groups, and how many instances of each role our own changes must leave (S28, S31).

    `floors` has that number by scenario and role. `num_lent`: blank instances that are kept for
    borrowers of groups, by region; the key is empty for any region.
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
    """`kv_transport`: the version of the KV wire format; instances of different ones never pair."""
    groups: dict[str, WantedGroup] = {}
    with_all = with_canaries(desired, upgrades)
    running = services(with_all, upgrades)
    revisions: dict[int, str] = {}  # by the service's id: many groups run the same one
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
    """One instance by its record. `assignment_id` 0: it has its role from its own settings."""

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
    kv_region: str = ""  # where its KV stays; empty: its group spans regions
    kv_addresses: tuple[str, ...] = ()
    verified: frozenset[PeerId] = frozenset()
    failed: frozenset[PeerId] = frozenset()
    failure: str = ""
    num_slots_used: int = 0
    node_id: str = ""
    domain: DomainRank | None = None  # None: it computes alone
    domain_address: str = ""  # where the ranks of a domain would connect to it as rank 0

    @property
    def id(self) -> PeerId:
        return PeerId(self.instance_id, self.incarnation)

    @property
    def is_loaded(self) -> bool:
        return Phase.LOADED <= self.phase <= Phase.DRAINED


@dataclass(frozen=True, slots=True)
class Observed:
    """The registry, now.

    `version` is the desired state's; 0: none was ever applied. Of the cordoned and ejected
    instances, those in `to_drain` drain; those in `out_at_once` become blank at once. `domains`
    and `lost_ranks` are empty until `domains.folding` has made one instance of each domain: they
    have the ranks of complete domains in order, and the lost instances of broken ones.
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
