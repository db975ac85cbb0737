"""A move of instances, its effect on groups, and plans of several moves.

A group is a set of prefill and decode instances that together serve one scenario, a kind of
requests. A group may be lent to a pool, which uses its instances for something else. A blank
instance has no role. Profiling, operators, the monitor and schedules all ask for changes with the
same `MovePlan` (S27). `move_refusal.py` decides whether a move must be refused.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from pdmesh.core.model import Role

TRAINING_POOL: Final = "training"
# The pool of groups that are switched off. They are lent to no user, and their instances are free.
OFF_POOL: Final = "off"


class Trigger(enum.StrEnum):
    """The part of the system that asked for a plan."""

    PROFILE = "profile"
    OPERATOR = "operator"
    MONITOR = "monitor"
    SCHEDULE = "schedule"


class MoveKind(enum.StrEnum):
    """The kind of a move.

    For ADD and CHANGE_ROLE, the move's `role` is the role that the instance gets. For REMOVE and
    MOVE, it is the role that the instance has. For LEND and RECLAIM, which move whole groups, it is
    None.
    """

    ADD = "add"  # a blank instance joins the group
    REMOVE = "remove"  # an instance is drained and becomes blank
    CHANGE_ROLE = "change_role"  # an instance of the other role becomes `role`, in the same group
    MOVE = "move"  # an instance goes to `to_group` and keeps its role
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

    `is_forced` means that an operator overrules most of the reasons that `refusal` finds.
    `asked_at` is in unix seconds, and only plans of schedules have it.
    """

    scenario: str
    trigger: Trigger
    moves: tuple[Move, ...]
    reason: str
    is_forced: bool = False
    asked_at: float = 0.0


@dataclass(frozen=True, slots=True)
class GroupShape:
    """A group's instances, and how busy they are.

    A busy value is the mean load of the instances of one role, 0..1, as `role_loads.py` measures
    it. None means that it is unknown. `pool` names the pool that has borrowed the group, and is
    empty while the group serves.
    """

    group_id: str
    scenario: str
    num_prefill: int
    num_decode: int
    prefill_busy: float | None = None
    decode_busy: float | None = None
    pool: str = ""
    model: str = ""  # instances move only between groups of one model
    region: str | None = None  # None: the group may be in several regions
    # How many blank instances could join the group. None: any blank instance could.
    num_blank: int | None = None
    num_fusion: int = 0
    fusion_busy: float | None = None
    allows_single: bool = False  # the scenario may depend on a single instance of a role

    @property
    def size(self) -> int:
        """The number of prefills and decodes. Fusion instances are not counted."""
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
        """The group with `by` more instances of a role.

        The same load spreads over the new number of instances.
        """
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
    """The serving groups of each scenario. A scenario whose groups are all lent has an
    empty list.
    """
    found: dict[str, list[GroupShape]] = {}
    for _, group in sorted(groups.items()):
        own = found.setdefault(group.scenario, [])
        if not group.pool:
            own.append(group)
    return found


def applied(groups: Groups, move: Move) -> dict[str, GroupShape]:
    """The groups as they are after the move."""
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
    """The changes of counts that a move of one instance causes, as (group, role, change)."""
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
