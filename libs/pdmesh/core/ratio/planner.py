"""Decides which moves bring a scenario nearer to the ratio of roles that it needs (S28, S30).

A scenario is a kind of requests with its own groups of instances. A move adds an instance to a
group, removes one, changes its role, or takes it to another group. If the times of requests are
known from a profile, `moves_to_best_split` plans all moves to the best split of prefills and
decodes. If one role is found to be short, `next_move` plans one move for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdmesh.core.model import Role
from pdmesh.core.moves.move import Groups, GroupShape, Move, MoveKind, other, serving
from pdmesh.core.moves.move_refusal import MAX_BUSY, MIN_PER_GROUP, least_in_scenario, refusal
from pdmesh.core.ratio.throughput import Profile, Split


@dataclass(frozen=True, slots=True)
class PlannerLimits:
    """Limits as busy shares, 0..1.

    When an instance leaves a role, the load of the remaining ones may be at most `max_busy`. A role
    that is less busy than `min_need` is not short.
    """

    max_busy: float = MAX_BUSY
    min_need: float = 0.6
    # The load of the giving role after the move must be below the load of the taking role before
    # the move, by at least this much.
    min_gain: float = 0.10


@dataclass(frozen=True, slots=True)
class MoveChoice:
    """One move, or None if no move is possible.

    `reasons` explain this move, and why cheaper moves were refused. `is_needed` is False if the
    role is not busy enough to need a move.
    """

    move: Move | None
    reasons: tuple[str, ...]
    is_needed: bool = True


def moves_to_best_split(
    profile: Profile, groups: Sequence[GroupShape], reason: str
) -> tuple[Move, ...]:
    """Role changes that give each group the profile's best split of its instances (formula (1)).

    Groups with too few instances for a split are left out.
    """
    least = least_in_scenario(groups[0]) if len(groups) == 1 else MIN_PER_GROUP
    moves: list[Move] = []
    for group in groups:
        if group.size >= 2 * least:
            best = profile.best_split(group.size, least)
            moves += changes_to(best, group, f"{reason}: {group.group_id} to {best}")
    return tuple(moves)


def changes_to(split: Split, group: GroupShape, reason: str) -> list[Move]:
    """The moves that lead from the group's counts to `split`.

    For each role, role changes come first, and then instances that are added or removed.
    """
    more_p = split.num_prefill - group.num_prefill
    more_d = split.num_decode - group.num_decode
    moves: list[Move] = []
    for role, more, less in ((Role.PREFILL, more_p, more_d), (Role.DECODE, more_d, more_p)):
        changed = min(max(0, more), max(0, -less))
        moves += [Move(group.group_id, MoveKind.CHANGE_ROLE, role, None, reason)] * changed
        moves += [Move(group.group_id, MoveKind.ADD, role, None, reason)] * (max(0, more) - changed)
        dropped = max(0, -more) - min(max(0, -more), max(0, less))
        moves += [Move(group.group_id, MoveKind.REMOVE, role, None, reason)] * dropped
    return moves


def next_move(
    short_of: Role,
    scenario: str,
    groups: Groups,
    num_blank: int,
    limits: PlannerLimits,
    reason: str,
) -> MoveChoice:
    """The cheapest possible move that helps the role `short_of` in the group where it is busiest.

    The cheapest kind of move changes the role of an instance of this group. The next cheapest adds
    a blank instance, which has no role. The third takes an instance from another group.
    """
    own = [g for g in serving(groups, scenario) if g.size]
    known = [(busy, g) for g in own if (busy := g.busy(short_of)) is not None]
    if not own or len(known) < len(own):
        return MoveChoice(None, (f"the load of the {short_of.value}s is unknown",))
    need, group = max(known, key=lambda pair: (pair[0], pair[1].group_id))
    if need < limits.min_need:
        why = f"{short_of.value}s are {need:.0%} busy: none is short"
        return MoveChoice(None, (why,), is_needed=False)
    refused: list[str] = []
    for move, why_not in _candidates(short_of, group, groups, limits, need):
        why_not = why_not or refusal(move, groups, limits.max_busy, num_blank=num_blank)
        if why_not is None:
            return MoveChoice(replace(move, reason=reason), (reason, *refused))
        refused.append(f"{move.kind.value}: {why_not}")
    return MoveChoice(None, tuple(refused) or ("no other role or group has room",))


def _candidates(
    role: Role, group: GroupShape, groups: Groups, limits: PlannerLimits, need: float
) -> list[tuple[Move, str | None]]:
    """The possible moves, cheapest first.

    A move that would only shift the shortage to another role is returned with the reason against
    it.
    """
    most = need - limits.min_gain
    changed = Move(group.group_id, MoveKind.CHANGE_ROLE, role)
    givers = [
        (busy, g.group_id)
        for g in groups.values()
        if g.group_id != group.group_id and not g.pool
        if (g.model, g.region) == (group.model, group.region)
        if g.num(role) > 1 and (busy := _without_one(g, role)) is not None and busy <= most
    ]
    moves = [
        (changed, _passed_on(group, other(role), most)),
        (Move(group.group_id, MoveKind.ADD, role), None),
    ]
    if givers:
        moves.append((Move(min(givers)[1], MoveKind.MOVE, role, group.group_id), None))
    return moves


def _passed_on(group: GroupShape, giver: Role, most: float) -> str | None:
    busy = _without_one(group, giver)
    if busy is None or busy <= most:
        return None
    return f"the other {giver.value}s would be {busy:.0%} busy"


def _without_one(group: GroupShape, role: Role) -> float | None:
    """How busy the role would be without one of its instances.

    None means that this is unknown, or that no instance would be left.
    """
    busy, num = group.busy(role), group.num(role)
    return None if busy is None or num < 2 else busy * num / (num - 1)
