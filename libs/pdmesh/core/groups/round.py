"""The data that the group controller works with in one round.

In a round the controller compares the registry with the desired groups. `Round` has the content of
the registry, and the assignments that the controller plans for the living instances. An assignment
is the order to one instance: a role spec, which says what the instance should be, and a stage,
which says how far it may go. A blank instance has no role yet.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from pdmesh.core.groups.cluster_state import InstanceStatus, Observed, WantedGroup
from pdmesh.core.groups.domains.folding import status_of
from pdmesh.core.groups.revisions import is_canary
from pdmesh.core.model import (
    Assignment,
    Peer,
    Phase,
    Role,
    RoleSpec,
    Stage,
)


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A living instance, with the assignment that it follows or is about to follow.

    A data-parallel domain is one instance here.
    """

    seen: InstanceStatus
    assignment: Assignment

    @property
    def instance_id(self) -> str:
        return self.seen.instance_id

    @property
    def role(self) -> Role:
        return self.assignment.role_spec.role

    @property
    def stage(self) -> Stage:
        return self.assignment.stage

    @property
    def revision(self) -> str:
        return self.assignment.role_spec.revision

    def is_stale(self, group: WantedGroup) -> bool:
        """Whether the group now has another scenario or revision than this member.

        An instance keeps its scenario and revision until its incarnation ends.
        """
        role_spec = self.assignment.role_spec
        return (role_spec.scenario, role_spec.revision) != (group.scenario, group.revision)

    @property
    def is_ready(self) -> bool:
        return self.stage is Stage.SERVE and self.seen.phase is Phase.READY

    @property
    def is_loaded(self) -> bool:
        return self.seen.is_loaded

    def may_exchange(self, other: GroupMember) -> bool:
        """Whether two members of one group have equal revisions and KV regions (S24, S58)."""
        mine, yours = self.seen.kv_region, other.seen.kv_region
        return self.revision == other.revision and mine == yours

    @property
    def is_departing(self) -> bool:
        """Whether the member drains without an order from the controller."""
        return self.stage < Stage.DRAIN and self.seen.phase in (Phase.DRAINING, Phase.DRAINED)

    @property
    def is_elsewhere(self) -> bool:
        """Whether the instance has taken another role spec than the one in this assignment.

        An incarnation takes only one role spec, so it will never follow this assignment.
        """
        seen, role_spec = self.seen, self.assignment.role_spec
        told = (seen.role, seen.group_id, seen.scenario, seen.revision)
        given = (role_spec.role, role_spec.group_id, role_spec.scenario, role_spec.revision)
        return seen.assignment_id != 0 and told != given


@dataclass(slots=True)
class _Blanks:
    num_planned: int  # the size of `Round.plan` when the blank instances were collected
    free: list[InstanceStatus]
    counts: dict[tuple[str, ...], Counter[str]] = field(default_factory=dict)  # by racks


@dataclass(slots=True)
class Round:
    """The state of a round.

    At the start, `plan` has the current assignments of the living instances. At the end, it has the
    assignments that these instances should get.
    """

    observed: Observed
    plan: dict[str, Assignment] = field(default_factory=dict)
    # Instances that get no new role after leaving, since they end, hang, are cordoned or ejected.
    unusable: frozenset[str] = frozenset()
    # The ranks of each data-parallel domain, in order. A domain is one member (`domains.folding`).
    domains: dict[str, tuple[InstanceStatus, ...]] = field(default_factory=dict)
    _blanks: _Blanks | None = None
    _ids: dict[str, list[str]] = field(default_factory=dict)  # instance ids by group
    _num_indexed: int = 0  # how many of the plan's instances, from its beginning, are in `_ids`

    def __post_init__(self) -> None:
        self.domains |= self.observed.domains
        for instance_id, assignment in sorted(self.observed.given.items()):
            seen = self.observed.seen.get(instance_id)
            if seen is not None and seen.incarnation == assignment.incarnation:
                self.plan[instance_id] = assignment

    def members(self, group_id: str) -> list[GroupMember]:
        """The members of a group, sorted by instance id."""
        self._index()
        seen, plan = self.observed.seen, self.plan
        return [GroupMember(seen[i], plan[i]) for i in self._ids.get(group_id, ())]

    def _index(self) -> None:
        """Add to `_ids` the instances that were appended to the plan since the last call."""
        if len(self.plan) < self._num_indexed:
            self._ids, self._num_indexed = {}, 0
        if len(self.plan) == self._num_indexed:
            return
        for instance_id in islice(self.plan, self._num_indexed, None):
            group_id = self.plan[instance_id].role_spec.group_id
            insort(self._ids.setdefault(group_id, []), instance_id)
        self._num_indexed = len(self.plan)

    def group_ids(self) -> list[str]:
        """All groups that are wanted or have members."""
        own = {assignment.role_spec.group_id for assignment in self.plan.values()}
        return sorted(own | self.observed.wanted.groups.keys())

    def form(self, role_spec: RoleSpec, ranks: Sequence[InstanceStatus]) -> InstanceStatus:
        """Combine blank instances, rank 0 first, into a new domain, which is one instance."""
        assert role_spec.domain is not None
        domain_id = role_spec.domain.domain_id
        self.domains[domain_id] = tuple(ranks)
        status = status_of(domain_id, ranks)
        self.observed = replace(self.observed, seen={**self.observed.seen, domain_id: status})
        return status

    def num_ranks(self, member: GroupMember) -> int:
        """How many instances the member consists of."""
        return len(self.domains.get(member.instance_id, ())) or 1

    def to_blame(self, member: GroupMember) -> list[str]:
        """The instances that made this member fail: its failed ranks, or all if none has failed."""
        ranks = self.domains.get(member.instance_id, (member.seen,))
        failed = [rank.instance_id for rank in ranks if rank.phase is Phase.FAILED]
        return failed or [rank.instance_id for rank in ranks]

    def set_stage(self, member: GroupMember, stage: Stage) -> None:
        peers = () if stage is Stage.BLANK else member.assignment.peers
        self.plan[member.instance_id] = replace(
            self.plan[member.instance_id], stage=stage, peers=peers
        )

    def blanks(self, racks: tuple[str, ...] = ()) -> Sequence[InstanceStatus]:
        """The blank instances that may get a role.

        Those that are kept for pools, the borrowers of groups, are left out. If `racks` is not
        empty, only instances in these racks are included.
        """
        free = self._all_blanks().free
        return [seen for seen in free if seen.rack in racks] if racks else free

    def num_blanks(self, racks: tuple[str, ...] = ()) -> Counter[str]:
        """How many blank instances there are, by region."""
        counts = self._all_blanks().counts
        if racks not in counts:
            counts[racks] = Counter(seen.region for seen in self.blanks(racks))
        return counts[racks]

    def _all_blanks(self) -> _Blanks:
        """All usable blank instances, cached until the plan grows.

        In a round, thousands of groups may ask for blank instances and get none.
        """
        if self._blanks is None or self._blanks.num_planned != len(self.plan):
            self._blanks = _Blanks(len(self.plan), self._find_blanks())
        return self._blanks

    def _find_blanks(self) -> list[InstanceStatus]:
        going = self.observed.to_drain | self.observed.out_at_once
        taken = {rank.instance_id for ranks in self.domains.values() for rank in ranks}
        found = [
            seen
            for instance_id, seen in sorted(self.observed.seen.items())
            if seen.phase is Phase.BLANK
            and instance_id not in self.plan
            and instance_id not in taken
            and instance_id not in self.domains
            and instance_id not in going
        ]
        kept: set[str] = set()
        for region, num in sorted(self.observed.wanted.num_lent.items(), reverse=True):
            able = [s.instance_id for s in found if region in ("", s.region)]
            kept.update([i for i in able if i not in kept][-num:])
        return [seen for seen in found if seen.instance_id not in kept]

    # --- peers -----------------------------------------------------------------------------------

    def connect_peers(self) -> None:
        """Set the peers of each instance (S25).

        A peer is an instance of the same group, revision and KV region, and of the other role, that
        can accept connections.
        """
        for group_id in self.group_ids():
            members = self.members(group_id)
            for member in members:
                if member.stage in (Stage.CONNECT, Stage.SERVE, Stage.DRAIN):
                    peers = tuple(_peer(other) for other in members if _are_peers(member, other))
                    self.plan[member.instance_id] = replace(member.assignment, peers=peers)

    # --- the capacity of scenarios ---------------------------------------------------------------

    def capacity(self, scenario: str, without: str = "") -> Counter[Role]:
        """The number of members that take requests of the scenario, by role.

        The instance `without` is left out. Prefills and decodes count only where they can exchange
        KV. A fusion instance counts for both. A canary, an extra group that tries a new revision,
        never counts, because a rollback may remove it at any moment.
        """
        cells: dict[tuple[str, str, str], Counter[Role]] = {}
        for instance_id, assignment in self.plan.items():
            member = GroupMember(self.observed.seen[instance_id], assignment)
            is_counted = member.is_ready and instance_id not in self.observed.out_at_once
            is_counted = is_counted and not is_canary(assignment.role_spec.group_id)
            if is_counted and instance_id != without and assignment.role_spec.scenario == scenario:
                key = (assignment.role_spec.group_id, member.revision, member.seen.kv_region)
                cells.setdefault(key, Counter())[member.role] += 1
        total: Counter[Role] = Counter()
        for cell in cells.values():
            is_pair = bool(cell[Role.PREFILL] and cell[Role.DECODE])
            for role in (Role.PREFILL, Role.DECODE):
                total[role] += cell[Role.FUSION] + (cell[role] if is_pair else 0)
            total[Role.POOLING] += cell[Role.POOLING]
        return total

    def why_not_leave(self, member: GroupMember, *, may_empty_group: bool) -> str:
        """A reason why the member must stay, or empty if it may leave.

        It must stay if its scenario would have too few members of a role without it. Unless
        `may_empty_group`, it must also stay if its group would have no ready member of its role.
        """
        if not member.is_ready:
            return ""
        role_spec = member.assignment.role_spec
        before = self.capacity(role_spec.scenario)
        after = self.capacity(role_spec.scenario, without=member.instance_id)
        for role in (Role.PREFILL, Role.DECODE, Role.POOLING):
            floor = self.observed.wanted.floor(role_spec.scenario, role)
            if after[role] < floor and after[role] < before[role]:
                return (
                    f"scenario {role_spec.scenario} would be left with {after[role]} {role.value}"
                )
        if not may_empty_group:
            others = [m for m in self.members(role_spec.group_id) if m.role is member.role]
            if not any(m.is_ready for m in others if m.instance_id != member.instance_id):
                return f"group {role_spec.group_id} would be left without {member.role.value}"
        return ""


def _are_peers(member: GroupMember, other: GroupMember) -> bool:
    if {member.role, other.role} != {Role.PREFILL, Role.DECODE}:
        return False
    if not member.may_exchange(other) or not other.is_loaded:
        return False
    if other.stage in (Stage.CONNECT, Stage.SERVE):
        return True
    # Serving peers may still pull KV from a draining prefill.
    return other.stage is Stage.DRAIN and member.is_ready and other.seen.phase is not Phase.DRAINED


def _peer(member: GroupMember) -> Peer:
    return Peer(member.seen.id, member.role, member.seen.kv_addresses)


def unverified_pairs(members: Iterable[GroupMember]) -> list[tuple[GroupMember, GroupMember]]:
    """The (decode, prefill) pairs whose connection the decode has not yet reported as verified."""
    met = [m for m in members if m.stage in (Stage.CONNECT, Stage.SERVE) and m.is_loaded]
    return [
        (decode, prefill)
        for decode in met
        if decode.role is Role.DECODE
        for prefill in met
        if prefill.role is Role.PREFILL
        and prefill.may_exchange(decode)
        and prefill.seen.id not in decode.seen.verified
    ]
