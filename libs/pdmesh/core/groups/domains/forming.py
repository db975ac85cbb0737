"""Decides which blank instances become the ranks of a new data-parallel domain (S121).

The ranks of a domain compute one model together. A blank instance has no role yet. A role spec says
what an instance should be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from pdmesh.core.groups.cluster_state import InstanceStatus
from pdmesh.core.model import DomainRank, RoleSpec


def chosen_ranks(
    candidates: Sequence[InstanceStatus],
    size: int,
    avoided: Collection[str],
    racks_in_use: Sequence[str],
) -> list[InstanceStatus]:
    """The blank instances for a new domain, rank 0 first. The list is empty if there are too few.

    Ranks exchange data in every layer, so all of them are in one region. They are in one rack if a
    rack has enough instances, and on few machines. If several racks have enough, the choice is the
    rack with the fewest instances of the group. Instances in `avoided` are the last choice.
    """
    able = [status for status in candidates if status.domain_address]
    regions = Counter(status.region for status in able)
    able = [status for status in able if regions[status.region] >= size]
    if not able:
        return []
    fresh = [status for status in able if status.instance_id not in avoided]
    free_in_region = Counter(status.region for status in fresh)
    free_in_rack = Counter((status.region, status.rack) for status in fresh)
    free_on_node = Counter((status.region, status.rack, status.node_id) for status in fresh)

    def rank_of(status: InstanceStatus) -> tuple[object, ...]:
        region, rack = status.region, (status.region, status.rack)
        node = (*rack, status.node_id)
        return (
            free_in_region[region] < size,
            region,
            status.instance_id in avoided,
            free_in_rack[rack] < size,
            racks_in_use.count(status.rack),
            -free_in_rack[rack],
            rack,
            -free_on_node[node],
            node,
            status.instance_id,
        )

    ordered = sorted(able, key=rank_of)
    return [status for status in ordered if status.region == ordered[0].region][:size]


def new_domain(role_spec: RoleSpec, number: int, ranks: Sequence[InstanceStatus]) -> RoleSpec:
    """The role spec of a new domain with these ranks. No other domain may get the same `number`."""
    domain = DomainRank(f"{role_spec.group_id}-d{number}", 0, len(ranks), ranks[0].domain_address)
    return replace(role_spec, domain=domain)
