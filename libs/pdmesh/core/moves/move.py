"""A move of instances, and the groups after it; a plan is several moves.

Profiling, operators, the monitor and schedules all ask for changes with the same `MovePlan` (S27).
`move_refusal.py` decides whether a move must not be made.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from pdmesh.core.model import Role

TRAINING_POOL: Final = "training"
# The pool of groups that are switched off: nothing borrows them, and their instances are free.
OFF_POOL: Final = "off"


class Trigger(enum.StrEnum):
    """What asked for a plan."""

    PROFILE = "profile"
    OPERATOR = "operator"
    MONITOR = "monitor"
    SCHEDULE = "schedule"


class MoveKind(enum.StrEnum):
    """What a move does.

    Its `role` is the role that the instance gets (ADD, CHANGE_ROLE) or has (REMOVE, MOVE); None for
    moves of whole groups.
    """

    ADD = "add"  # a blank instance joins the group
    REMOVE = "remove"  # an instance is drained and becomes blank
    CHANGE_ROLE = "change_role"  # an instance of the other role becomes `role`, in the same group
    MOVE = "move"  # an instance leaves for `to_group` and keeps its role
    LEND = "lend"  # the whole group goes to the pool `to_group`
    RECLAIM = "reclaim"  # the whole group comes back from its pool


@dataclass(frozen=True, slots=True)
class Move:
    group_id: str
    kind: MoveKind
    role: Role | None
    to_group: str | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        is_whole = self.kind in (MoveKind.LEND, MoveKind.RECLAIM)
        if is_whole is not (self.role is None):
            wrong = "takes no role: it moves whole groups" if is_whole else "needs a role"
            raise ValueError(f"{self.kind.value} {wrong}")


@dataclass(frozen=True, slots=True)
class MovePlan:
    """Moves to make one after the other.

    `is_forced`: an operator overrules what `refusal` would say. `asked_at` is in unix seconds; only
    plans of schedules have it.
    """

    scenario: str
    trigger: Trigger
    moves: tuple[Move, ...]
    reason: str
    is_forced: bool = False
    asked_at: float = 0.0


@dataclass(frozen=True, slots=True)
class GroupShape:
    """A group's instances, and the mean share of their slots and KV that is taken.

    Shares are 0..1; None: not known. `pool` names the pool that has borrowed the group; empty while
    it serves.
    """

    group_id: str
    scenario: str
    num_prefill: int
    num_decode: int
    prefill_busy: float | None = None
    decode_busy: float | None = None
    pool: str = ""
    model: str = ""  # instances move only between groups of one model
    region: str | None = None  # instances stay in it; None: the group may be in several
    num_blank: int | None = None  # blank members that could join it; None: any blank instance
    num_fusion: int = 0
    fusion_busy: float | None = None
    allows_single: bool = False  # its scenario may depend on one instance of a role

    @property
    def size(self) -> int:
        """The number of instances that its ratio counts."""
        return self.num_prefill + self.num_decode

    @property
    def has_ratio(self) -> bool:
        return self.num_prefill > 0

    def num(self, role: Role) -> int:
        match role:
            case Role.PREFILL:
                return self.num_prefill
            case Role.DECODE:
                return self.num_decode
            case _:
                return self.num_fusion

    def busy(self, role: Role) -> float | None:
        match role:
            case Role.PREFILL:
                return self.prefill_busy
            case Role.DECODE:
                return self.decode_busy
            case _:
                return self.fusion_busy

    def changed(self, role: Role, by: int) -> GroupShape:
        """The group with `by` more instances of a role, over which the same load spreads."""
        before, after = self.num(role), self.num(role) + by
        busy = self.busy(role)
        spread = None if busy is None or after < 1 else busy * before / after
        if role is Role.PREFILL:
            return replace(self, num_prefill=after, prefill_busy=spread)
        return replace(self, num_decode=after, decode_busy=spread)


Groups = Mapping[str, GroupShape]


def other(role: Role) -> Role:
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL


def serving(groups: Groups, scenario: str) -> list[GroupShape]:
    """The scenario's groups that are neither lent nor switched off, by id."""
    found = [g for g in groups.values() if g.scenario == scenario and not g.pool]
    return sorted(found, key=lambda group: group.group_id)


def serving_by_scenario(groups: Groups) -> dict[str, list[GroupShape]]:
    """The serving groups of each scenario that has groups, even if all of them are lent."""
    found: dict[str, list[GroupShape]] = {}
    for _, group in sorted(groups.items()):
        own = found.setdefault(group.scenario, [])
        if not group.pool:
            own.append(group)
    return found


def applied(groups: Groups, move: Move) -> dict[str, GroupShape]:
    """The groups after a move."""
    after = dict(groups)
    group = after[move.group_id]
    if move.role is None:
        pool = (move.to_group or TRAINING_POOL) if move.kind is MoveKind.LEND else ""
        after[move.group_id] = replace(group, pool=pool)
        return after
    for group_id, role, by in count_changes(move):
        after[group_id] = after[group_id].changed(role, by)
    return after


def count_changes(move: Move) -> list[tuple[str, Role, int]]:
    """(group, role, change of count) for each group that a move of one instance changes."""
    assert move.role is not None
    match move.kind:
        case MoveKind.ADD:
            return [(move.group_id, move.role, 1)]
        case MoveKind.REMOVE:
            return [(move.group_id, move.role, -1)]
        case MoveKind.CHANGE_ROLE:
            return [(move.group_id, other(move.role), -1), (move.group_id, move.role, 1)]
        case MoveKind.MOVE:
            assert move.to_group is not None
            return [(move.group_id, move.role, -1), (move.to_group, move.role, 1)]
        case MoveKind.LEND | MoveKind.RECLAIM:
            raise AssertionError("only whole groups are lent")


def inverse(move: Move, reason: str) -> Move:
    """The move that undoes this one."""
    match move.kind:
        case MoveKind.ADD:
            return replace(move, kind=MoveKind.REMOVE, reason=reason)
        case MoveKind.REMOVE:
            return replace(move, kind=MoveKind.ADD, reason=reason)
        case MoveKind.CHANGE_ROLE:
            assert move.role is not None
            return replace(move, role=other(move.role), reason=reason)
        case MoveKind.MOVE:
            assert move.to_group is not None
            return replace(move, group_id=move.to_group, to_group=move.group_id, reason=reason)
        case MoveKind.LEND:
            return replace(move, kind=MoveKind.RECLAIM, to_group=None, reason=reason)
        case MoveKind.RECLAIM:
            return replace(move, kind=MoveKind.LEND, to_group=TRAINING_POOL, reason=reason)
