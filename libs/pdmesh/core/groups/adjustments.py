"""Applies adjustments to the desired state (S11, S28).

The desired state is the operator's file of groups. A plan of moves changes groups in steps: one
instance joins, leaves or changes its role, or one group is lent to a pool or switched off. A pool
borrows whole groups for other work. An adjustment is the change to the desired state that such a
plan has made: other counts for one group, or that the group is lent or off. If the operator changes
the counts of the group in the file, the adjustment becomes invalid. The caller must erase an
invalid adjustment. Otherwise it would return when the file has the old counts again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pdmesh.core.groups.desired import Desired, Group
from pdmesh.core.model import Role
from pdmesh.core.moves.move import (
    OFF_POOL,
    GroupShape,
    Move,
    applied,
)


@dataclass(frozen=True, slots=True)
class Adjustment:
    """The changed counts of a group.

    `pool` names the pool that has borrowed the group, or is OFF_POOL if the group is switched off.
    It is empty while the group serves. When the adjustment was made, the desired state asked for
    `base` prefills and decodes and for `base_fusion` fusion instances.
    """

    prefill: int
    decode: int
    base: tuple[int, int]
    pool: str = ""
    reason: str = ""
    base_fusion: int = 0


Adjustments = Mapping[str, Adjustment]  # by group
Busy = Callable[[str, Role], float | None]  # (group, role) -> share in use, 0..1


class CannotMove(Exception):
    """The desired state does not allow this move."""


def valid(desired: Desired, adjustments: Adjustments) -> dict[str, Adjustment]:
    """The adjustments that are still valid.

    The group must exist, and the operator must not have changed its counts.
    """
    return {
        group_id: adjustment
        for group_id, adjustment in sorted(adjustments.items())
        if (group := desired.groups.get(group_id)) is not None
        and adjustment.base == (group.prefill, group.decode)
        and adjustment.base_fusion == group.fusion
    }


def adjusted(desired: Desired, adjustments: Adjustments) -> Desired:
    """The desired state with adjusted counts and without the groups that are lent or off."""
    known = valid(desired, adjustments)
    groups: dict[str, Group] = {}
    for group_id, group in desired.groups.items():
        adjustment = known.get(group_id)
        if adjustment is None:
            groups[group_id] = group
        elif not adjustment.pool:
            groups[group_id] = replace(group, prefill=adjustment.prefill, decode=adjustment.decode)
    return replace(desired, groups=groups)


def num_lent(desired: Desired, adjustments: Adjustments) -> Counter[str]:
    """How many instances are kept for the pools that borrowed groups, by region.

    An empty region means any region.
    """
    lent: Counter[str] = Counter()
    for group_id, adjustment in valid(desired, adjustments).items():
        if adjustment.pool not in ("", OFF_POOL):
            group = desired.groups[group_id]
            lent[group.region] += desired.num_instances(group)
    return lent


def group_shapes(desired: Desired, adjustments: Adjustments, busy: Busy) -> dict[str, GroupShape]:
    """The groups as plans of moves see them, with adjusted counts and with loads."""
    known = valid(desired, adjustments)
    states: dict[str, GroupShape] = {}
    for group_id, group in sorted(desired.groups.items()):
        adjustment = known.get(group_id)
        states[group_id] = GroupShape(
            group_id,
            group.scenario,
            adjustment.prefill if adjustment else group.prefill,
            adjustment.decode if adjustment else group.decode,
            busy(group_id, Role.PREFILL),
            busy(group_id, Role.DECODE),
            adjustment.pool if adjustment else "",
            desired.service_of(group).model,
            num_fusion=group.fusion,
            fusion_busy=busy(group_id, Role.FUSION) if group.fusion else None,
            allows_single=desired.allows_single(group.scenario),
        )
    return states


def after(move: Move, desired: Desired, adjustments: Adjustments) -> dict[str, Adjustment]:
    """The adjustments after this move. Raises CannotMove."""
    before = group_shapes(desired, adjustments, lambda group_id, role: None)
    for group_id in (move.group_id, *([move.to_group] if move.role and move.to_group else ())):
        if group_id not in before:
            raise CannotMove(f"there is no group {group_id}")
        if move.role and not before[group_id].has_ratio:
            raise CannotMove(f"group {group_id} has no prefills and decodes")
    result = valid(desired, adjustments)
    for group_id, state in applied(before, move).items():
        if state == before[group_id]:
            continue
        group = desired.groups[group_id]
        base = (group.prefill, group.decode)
        changed = Adjustment(
            state.num_prefill, state.num_decode, base, state.pool, move.reason, group.fusion
        )
        if (changed.prefill, changed.decode) == base and not changed.pool:
            result.pop(group_id, None)
        else:
            result[group_id] = changed
    return result
