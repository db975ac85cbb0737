"""Folds the ranks of a data-parallel domain into one instance, and unfolds it (S75, S121).

A domain is a set of instances that compute one model together. These instances are its ranks. The
engines of a mixture of experts step together, so if one rank is lost, the others wait for it. The
group controller therefore treats a domain as one member of a group. Before a round of the
controller, `folded` puts one instance in place of each complete domain, and names it by the
domain's id. After the round, `unfolded` gives each rank the domain's assignment, which is an order
to take a role. The ranks of a broken domain stay single instances, which the controller makes
blank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pdmesh.core.groups.cluster_state import InstanceStatus, Observed
from pdmesh.core.model import Assignment, Peer, PeerId, Phase, RoleSpec, Stage

Ranks = Mapping[str, tuple[InstanceStatus, ...]]  # the ranks of each domain, in order


@dataclass(slots=True)
class _Formation:
    """One domain, as its ranks' assignments and records describe it."""

    size: int
    ranks: dict[int, InstanceStatus] = field(default_factory=dict)
    given: dict[int, Assignment] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)  # ranks that are gone, with no order to leave
    last: Assignment | None = None  # the assignment of a lost rank

    @property
    def is_complete(self) -> bool:
        return len(self.ranks) == self.size


def folded(observed: Observed) -> Observed:
    """The same registry, with one instance for each complete domain.

    If a domain has lost a rank, the result has an assignment for the domain, but no instance. The
    domain's living ranks stay in the result as single instances.
    """
    formations = _formations(observed)
    if not formations:
        return observed
    seen, given = dict(observed.seen), dict(observed.given)
    domains: dict[str, tuple[InstanceStatus, ...]] = {}
    lost_ranks: dict[str, tuple[str, ...]] = {}
    for domain_id, formation in sorted(formations.items()):
        if formation.is_complete:
            ranks = domains[domain_id] = tuple(r for _, r in sorted(formation.ranks.items()))
            for rank in ranks:
                del seen[rank.instance_id]
                given.pop(rank.instance_id, None)
            if formation.given:
                given[domain_id] = _assignment_of(ranks[0], formation.given.values())
        elif formation.last is not None:
            lost_ranks[domain_id] = tuple(formation.lost)
            given[domain_id] = formation.last
        for instance_id in formation.lost:
            given.pop(instance_id, None)  # the domain's assignment replaces it
    of_rank = {rank.id: _id_of(i, ranks) for i, ranks in domains.items() for rank in ranks}
    sizes = {_id_of(i, ranks): len(ranks) for i, ranks in domains.items()}
    for instance_id, status in seen.items():
        seen[instance_id] = replace(status, verified=_verified([status], of_rank, sizes))
    for domain_id, ranks in domains.items():
        seen[domain_id] = status_of(
            domain_id, ranks, _verified(ranks, of_rank, sizes), _failed(ranks, of_rank)
        )
    return replace(
        observed,
        seen=seen,
        given=given,
        to_drain=observed.to_drain | _touched(domains, observed.to_drain),
        out_at_once=observed.out_at_once | _touched(domains, observed.out_at_once),
        domains=domains,
        lost_ranks=lost_ranks,
    )


def unfolded(plan: Mapping[str, Assignment], domains: Ranks) -> dict[str, Assignment]:
    """The assignments of all single instances.

    Each rank gets the assignment of its domain. Each peer that is a domain is replaced by the
    domain's ranks.
    """
    found: dict[str, Assignment] = {}
    for member_id, assignment in plan.items():
        peers = _peers_of(assignment.peers, domains)
        ranks, domain = domains.get(member_id), assignment.role_spec.domain
        if ranks is None or domain is None:
            found[member_id] = replace(assignment, peers=peers)
            continue
        for dp_rank, rank in enumerate(ranks):
            role_spec = replace(assignment.role_spec, domain=replace(domain, dp_rank=dp_rank))
            found[rank.instance_id] = replace(
                assignment, incarnation=rank.incarnation, role_spec=role_spec, peers=peers
            )
    return found


def status_of(
    domain_id: str,
    ranks: Sequence[InstanceStatus],
    verified: frozenset[PeerId] = frozenset(),
    failed: frozenset[PeerId] = frozenset(),
) -> InstanceStatus:
    """Combine the ranks of a domain into one instance, with the phase that `_phase_of` finds."""
    first = ranks[0]
    # A rank that has not reported its assignment yet has none, or an older one.
    told = max(ranks, key=lambda rank: rank.assignment_id)
    broken = next(((n, r) for n, r in enumerate(ranks) if r.phase is Phase.FAILED), None)
    return replace(
        first,
        instance_id=domain_id,
        phase=_phase_of([rank.phase for rank in ranks]),
        role=told.role,
        group_id=told.group_id,
        scenario=told.scenario,
        revision=told.revision,
        assignment_id=told.assignment_id,
        failure=f"{broken[1].instance_id}, rank {broken[0]}: {broken[1].failure}" if broken else "",
        num_slots_used=sum(rank.num_slots_used for rank in ranks),
        verified=verified,
        failed=failed,
    )


def is_lone_rank(member_id: str, assignment: Assignment) -> bool:
    """Whether this member of a folded registry is a single rank, because its domain is broken."""
    domain = assignment.role_spec.domain
    return domain is not None and domain.domain_id != member_id


def _formations(observed: Observed) -> dict[str, _Formation]:
    found: dict[str, _Formation] = {}
    for instance_id, assignment in observed.given.items():
        if (domain := assignment.role_spec.domain) is None:
            continue
        formation = found.setdefault(domain.domain_id, _Formation(domain.dp_size))
        status = observed.seen.get(instance_id)
        if status is not None and status.incarnation == assignment.incarnation:
            if status.assignment_id == 0 or status.domain == domain:
                formation.ranks[domain.dp_rank] = status
                formation.given[domain.dp_rank] = assignment
        elif assignment.stage < Stage.DRAIN:
            formation.lost.append(instance_id)
            formation.last = replace(assignment, role_spec=_named(assignment))
    for instance_id, status in observed.seen.items():
        mine = observed.given.get(instance_id)
        is_given = mine is not None and mine.incarnation == status.incarnation
        if (domain := status.domain) is not None and not is_given:
            formation = found.setdefault(domain.domain_id, _Formation(domain.dp_size))
            formation.ranks[domain.dp_rank] = status
    return found


def _assignment_of(first: InstanceStatus, given: Iterable[Assignment]) -> Assignment:
    """The assignment of the whole domain, from the assignments of its ranks.

    The ranks may have different stages if a leader died while it wrote their assignments. If any
    rank has the order to leave, the whole domain leaves. Otherwise the domain has the earliest
    stage of its ranks.
    """
    by_stage = sorted(given, key=lambda assignment: assignment.stage)
    chosen = by_stage[-1] if by_stage[-1].stage >= Stage.DRAIN else by_stage[0]
    epoch = max(assignment.epoch for assignment in by_stage)
    return replace(
        chosen,
        incarnation=first.incarnation,
        epoch=epoch,
        role_spec=_named(chosen),
        peers=(),
    )


def _named(assignment: Assignment) -> RoleSpec:
    """The domain's role spec (what an instance should be), equal for all ranks' assignments."""
    role_spec = assignment.role_spec
    assert role_spec.domain is not None
    return replace(role_spec, domain=replace(role_spec.domain, dp_rank=0))


def _phase_of(phases: Collection[Phase]) -> Phase:
    """The phase of a domain, from the phases of its ranks.

    If one rank fails or drains, so does the domain. The domain is drained when all ranks are
    drained. Otherwise it is in the phase of the rank that is furthest behind.
    """
    if Phase.FAILED in phases:
        return Phase.FAILED
    if Phase.DRAINING in phases or Phase.DRAINED in phases:
        return Phase.DRAINED if set(phases) == {Phase.DRAINED} else Phase.DRAINING
    return min(phases)


def _id_of(domain_id: str, ranks: Sequence[InstanceStatus]) -> PeerId:
    return PeerId(domain_id, ranks[0].incarnation)


def _verified(
    ranks: Sequence[InstanceStatus],
    of_rank: Mapping[PeerId, PeerId],
    sizes: Mapping[PeerId, int],
) -> frozenset[PeerId]:
    """The members to which all of these ranks have a verified connection.

    A member that is a domain is included only if the ranks are connected to all of its ranks.
    """
    common = frozenset.intersection(*(rank.verified for rank in ranks))
    counts = Counter(of_rank.get(peer, peer) for peer in common)
    return frozenset(peer for peer, num in counts.items() if num == sizes.get(peer, 1))


def _failed(ranks: Sequence[InstanceStatus], of_rank: Mapping[PeerId, PeerId]) -> frozenset[PeerId]:
    return frozenset(of_rank.get(peer, peer) for rank in ranks for peer in rank.failed)


def _touched(domains: Ranks, instance_ids: frozenset[str]) -> frozenset[str]:
    return frozenset(
        domain_id
        for domain_id, ranks in domains.items()
        if any(rank.instance_id in instance_ids for rank in ranks)
    )


def _peers_of(peers: Iterable[Peer], domains: Ranks) -> tuple[Peer, ...]:
    found: list[Peer] = []
    for peer in peers:
        ranks = domains.get(peer.id.instance_id)
        if ranks is None:
            found.append(peer)
        else:
            found += [Peer(rank.id, peer.role, rank.kv_addresses) for rank in ranks]
    return tuple(found)
