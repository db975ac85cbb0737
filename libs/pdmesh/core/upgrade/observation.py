"""Builds the input of the upgrade controller, `GroupsObserved`.

The controller gives a new revision to the groups of a scenario, which is a kind of requests. The
input comes from the desired state, the last round of the group controller, and `Surroundings`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pdmesh.core.groups.cluster_state import Observed
from pdmesh.core.groups.controller import GroupReport, GroupState
from pdmesh.core.groups.desired import Desired, Group
from pdmesh.core.groups.revisions import Upgrades, with_canaries
from pdmesh.core.groups.round import Round
from pdmesh.core.model import Role
from pdmesh.core.upgrade.events import GroupSeen, GroupsObserved
from pdmesh.core.upgrade.revision_health import GroupRevision

Busy = Callable[[str, Role], float | None]  # (group, role) -> mean load of the instances, 0..1


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Facts from other parts of the master, which the group controller does not have.

    `faulty` has the suspected and faulty instances by group and revision, each with a reason.
    `planning` has the scenarios in which planned moves of instances are changing groups.
    `gathering` is the subset of `planning` in which the moves only wait for instances.
    """

    busy: Busy
    faulty: Mapping[GroupRevision, Mapping[str, str]] = field(default_factory=dict)
    planning: frozenset[str] = frozenset()
    gathering: frozenset[str] = frozenset()
    # The share of requests for the canary, an extra first group, given with the desired state.
    canary_share: float = 0.0
    lost_versions: frozenset[int] = frozenset()  # old desired states that cannot be restored


def observe(
    asked: Desired,
    adjusted: Desired,
    upgrades: Upgrades,
    observed: Observed,
    reports: Mapping[str, GroupReport],
    around: Surroundings,
) -> GroupsObserved:
    """Build the input for one round of the upgrade controller.

    `asked` is the desired state, and `adjusted` is the desired state with the changes that planned
    moves have made. Groups that the group controller has not reported are left out.
    """
    round_ = Round(observed)
    named = with_canaries(adjusted, upgrades).groups
    groups = {
        group_id: _seen(round_, group_id, group, reports[group_id], around)
        for group_id, group in named.items()
        if group_id in observed.wanted.groups and group_id in reports
    }
    each = {name: next(iter(g.values())) for name, g in asked.groups_by_scenario().items()}
    return GroupsObserved(
        version=observed.version,
        targets={name: asked.service_of(group) for name, group in each.items()},
        upgrades=upgrades,
        groups=groups,
        canary_share=around.canary_share,
        limits={name: asked.scenario_of(group).upgrade for name, group in each.items()},
        floors=observed.wanted.floors,
        planning=around.planning,
        gathering=around.gathering,
        lost_versions=around.lost_versions,
    )


def _seen(
    round_: Round, group_id: str, group: Group, report: GroupReport, around: Surroundings
) -> GroupSeen:
    wanted = round_.observed.wanted.groups[group_id]
    blanks = round_.num_blanks(group.racks)
    regions = group.regions or blanks
    has_failed = report.state is GroupState.FAILED
    return GroupSeen(
        group_id,
        group.scenario,
        wanted.revision,
        wanted.counts,
        {role: around.busy(group_id, role) for role in wanted.counts},
        is_whole=report.state is GroupState.SERVING,
        serves=any(m.is_ready for m in round_.members(group_id)),
        num_blank=sum(blanks[region] for region in regions),
        failure=(report.detail or "it could not be set up") if has_failed else "",
        detail=report.detail,
        faulty=around.faulty.get((group_id, wanted.revision), {}),
        dp_sizes=wanted.dp_sizes,
    )
