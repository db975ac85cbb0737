"""Applies the changes that plans have made to the desired state: counts and loans (S11, S28).

An adjustment changes the counts of a group, or says that the group is lent. It is valid while the
desired state asks for the same counts as when the adjustment was made, because an operator's change
of the counts overrides it. An invalid adjustment is erased, so that it does not return when the
desired state asks for the old counts again.
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
    """The counts of a group as plans have changed them.

    `pool`: the pool that has borrowed the group, or OFF_POOL; empty while it serves. `base`: the
    prefills and decodes that the desired state asked for; `base_fusion`: the fusion instances.
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
    """The adjustments without those whose group is gone or whose counts an operator has changed."""
    return {
        group_id: adjustment
        for group_id, adjustment in sorted(adjustments.items())
        if (group := desired.groups.get(group_id)) is not None
        and adjustment.base == (group.prefill, group.decode)
        and adjustment.base_fusion == group.fusion
    }


def adjusted(desired: Desired, adjustments: Adjustments) -> Desired:
    """The desired state with the adjustments made. Lent groups are left out."""
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
    """How many instances are kept for borrowers of groups, by region; an empty region means any."""
    lent: Counter[str] = Counter()
    for group_id, adjustment in valid(desired, adjustments).items():
        if adjustment.pool not in ("", OFF_POOL):
            group = desired.groups[group_id]
            lent[group.region] += desired.num_instances(group)
    return lent


def group_shapes(desired: Desired, adjustments: Adjustments, busy: Busy) -> dict[str, GroupShape]:
    """The groups as plans see them: with their adjusted counts, and their loads."""
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
    """The adjustments once this move is included. Raises CannotMove."""
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
