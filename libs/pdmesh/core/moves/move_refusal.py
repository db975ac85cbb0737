"""Decides whether a move of instances must be refused, to protect the remaining instances (S28).

A scenario is a kind of requests with its own groups of instances. A plan of moves leaves at least
one instance of each role in a group, and at least two in a scenario (S31). One instance in a
scenario is enough if the scenario allows it. A plan takes an instance away only if the remaining
ones can carry its load. Each of the N - 1 survivors will carry N/(N - 1) of its present load. If
the present load is unknown, the move is refused.

Fusion instances do both phases, so they count for both roles. A group of only fusion instances has
no ratio of prefills to decodes, and can only be lent as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pdmesh.core.model import Role
from pdmesh.core.moves.move import Groups, GroupShape, Move, MoveKind, count_changes, serving

MAX_BUSY: Final = 0.85  # a survivor may use this share of its capacity
MIN_PER_GROUP: Final = 1
MIN_PER_SCENARIO: Final = 2


def least_in_scenario(group: GroupShape) -> int:
    """How many instances of each role the group's scenario must keep."""
    return MIN_PER_GROUP if group.allows_single else MIN_PER_SCENARIO


def refusal(
    move: Move, groups: Groups, max_busy: float, *, is_forced: bool = False, num_blank: int = 0
) -> str | None:
    """Why the move must not be made now. None means that it may be made.

    `is_forced` overrules most reasons. A move is still refused if it is impossible, or if it would
    leave a group without a role or a scenario without a group.
    """
    group = groups.get(move.group_id)
    if group is None:
        return f"there is no group {move.group_id}"
    if move.role is None:
        return _group_refusal(move, group, groups, max_busy, is_forced=is_forced)
    if move.kind is MoveKind.ADD and (why := _no_blank(group, num_blank)):
        return why
    to_group = groups.get(move.to_group or "")
    if to_group is not None and to_group.region != group.region:
        return f"group {move.to_group} is in another region"
    for group_id, role, by in count_changes(move):
        changed = groups.get(group_id)
        if changed is None or changed.pool:
            return f"group {group_id} does not serve"
        if not changed.has_ratio:
            return f"group {group_id} has no prefills and decodes"
        if by < 0 and (why := _survivors_refusal(changed, role, groups, max_busy, is_forced)):
            return why
    return None


def _no_blank(group: GroupShape, num_blank: int) -> str | None:
    if (num_blank if group.num_blank is None else group.num_blank) > 0:
        return None
    return f"no blank instance in region {group.region}" if group.region else "no blank instance"


def _survivors_refusal(
    group: GroupShape, role: Role, groups: Groups, max_busy: float, is_forced: bool
) -> str | None:
    num_left = group.num(role) - 1
    if num_left < MIN_PER_GROUP:
        return f"group {group.group_id} would have no {role.value}"
    if is_forced:
        return None
    own = serving(groups, group.scenario)
    left_in_scenario = sum(g.num(role) + g.num_fusion for g in own) - 1
    if left_in_scenario < least_in_scenario(group):
        return f"scenario {group.scenario} would depend on a single {role.value}"
    busy = group.busy(role)
    if busy is None:
        return f"the load of {group.group_id}'s {role.value}s is unknown"
    if (carried := busy * group.num(role) / num_left) > max_busy:
        return f"{num_left} {role.value} of {group.group_id} would be {carried:.0%} busy"
    return None


def _group_refusal(
    move: Move, group: GroupShape, groups: Groups, max_busy: float, *, is_forced: bool
) -> str | None:
    if move.kind is MoveKind.RECLAIM:
        return None if group.pool else f"group {group.group_id} is not lent"
    if group.pool:
        return f"group {group.group_id} does not serve"
    others = [g for g in serving(groups, group.scenario) if g.group_id != group.group_id]
    if not others:
        return f"{group.group_id} is the last group of scenario {group.scenario}"
    return None if is_forced else _others_refusal(group, others, max_busy)


def _others_refusal(group: GroupShape, others: Iterable[GroupShape], max_busy: float) -> str | None:
    for role in (Role.PREFILL, Role.DECODE):
        left = sum(g.num(role) + g.num_fusion for g in others)
        if left < least_in_scenario(group):
            return f"scenario {group.scenario} would depend on a single {role.value}"
        taken = 0.0
        for each in (group, *others):
            for able in (r for r in (role, Role.FUSION) if each.num(r)):
                if (busy := each.busy(able)) is None:
                    return f"the load of {each.group_id}'s {able.value}s is unknown"
                taken += busy * each.num(able)
        if taken / left > max_busy:
            return f"the other groups' {role.value}s would be {taken / left:.0%} busy"
    return None
