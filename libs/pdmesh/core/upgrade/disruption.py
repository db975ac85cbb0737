"""Decides whether a group may be taken out of service for an upgrade now (S24).

A scenario is a kind of requests with its own groups of instances. Only one group over all scenarios
changes at a time. It changes only while the other groups of its scenario are complete and can carry
the requests.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from pdmesh.core.model import Role
from pdmesh.core.moves.move_refusal import MAX_BUSY
from pdmesh.core.upgrade.events import GroupSeen
from pdmesh.core.upgrade.round import UpgradeRound


def why_not_now(
    round_: UpgradeRound, may_be_broken: Collection[str], planning: Collection[str]
) -> str:
    """Why no group of the scenario may change now, or empty if one may.

    Groups in `may_be_broken` need not be complete. `planning` has the scenarios in which planned
    moves of instances are changing groups.
    """
    if round_.is_taken:
        return "a group of another scenario is being changed"
    if round_.scenario in planning:
        return "a plan is under way"
    broken = (g for g in round_.groups if g.serves and not g.is_whole)
    found = next((g for g in broken if g.group_id not in may_be_broken), None)
    if found is None:
        return ""
    return f"group {found.group_id} is not whole: {found.detail}".rstrip(": ")


def why_no_room(round_: UpgradeRound, group: GroupSeen) -> str:
    """Why the group cannot make room for its new instances, or empty if it can.

    The new instances need as many blank instances, which have no role, as the group has instances.
    For each missing blank instance, an old instance of any role must leave first. A data-parallel
    domain leaves with all of its ranks.
    """
    short = max(0, group.num_instances - group.num_blank)
    if not short:
        return ""
    others = [g for g in round_.groups if g.serves]
    num_leaving = 0
    for role in (r for r, count in group.counts.items() if count):
        total, own = sum(g.counts[role] for g in others), group.counts[role]
        of_floor = Role.PREFILL if role is Role.FUSION else role
        floor = max(1, round_.observed.floors.get((round_.scenario, of_floor), 0))
        ranks = group.dp_size(role)
        num_leaving += ranks * max(0, min(own, total - floor))
        num_left = max(floor, total - min(math.ceil(short / ranks), own))
        if why := _why_too_busy(others, role, num_left):
            return f"{why}; {_more_needed(short)}"
    if num_leaving < short:
        few = f"only {num_leaving} instance{'' if num_leaving == 1 else 's'} may leave"
        return f"{few}; {_more_needed(short - num_leaving)}"
    return ""


def _more_needed(num: int) -> str:
    return f"{num} more blank instance{' is' if num == 1 else 's are'} needed"


def _why_too_busy(groups: Iterable[GroupSeen], role: Role, num_left: int) -> str:
    taken = 0.0
    for group in groups:
        if not group.counts[role]:
            continue
        if (busy := group.busy.get(role)) is None:
            return f"the load of {group.group_id}'s {role.value}s is unknown"
        taken += busy * group.counts[role]
    share = taken / num_left
    return f"{num_left} {role.value} would be {share:.0%} busy" if share > MAX_BUSY else ""
