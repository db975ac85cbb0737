"""Converts adjustments of the desired state between the stored form and the core's types.

An adjustment is a change to the desired state that a plan of moves made, for example one prefill
more in a group. A schedule begins such plans at given times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from pdmesh.core.groups.adjustments import Adjustment, Adjustments
from pdmesh.core.groups.desired import ScheduleLine
from pdmesh.core.model import Role
from pdmesh.core.moves.cron import Cron
from pdmesh.core.moves.move import (
    Move,
    MoveKind,
    MovePlan,
    Trigger,
)
from pdmesh.core.moves.next_move import PendingPlan
from pdmesh.core.moves.schedule import ScheduleAction, ScheduleEntry
from pdmesh.v1 import admin_service_pb2 as pb


def adjustments_from(message: pb.Adjustments) -> dict[str, Adjustment]:
    return {
        each.group_id: Adjustment(
            each.num_prefill,
            each.num_decode,
            (each.base_num_prefill, each.base_num_decode),
            each.pool,
            each.reason,
            each.base_num_fusion,
        )
        for each in message.groups
    }


def adjustments_to(
    adjustments: Adjustments,
    fired: Mapping[str, float],
    pending: Iterable[PendingPlan],
    epoch: int,
) -> pb.Adjustments:
    return pb.Adjustments(
        epoch=epoch,
        fired=dict(fired),
        pending=map(_pending_to, pending),
        groups=[
            pb.GroupAdjustment(
                group_id=group_id,
                num_prefill=each.prefill,
                num_decode=each.decode,
                pool=each.pool,
                base_num_prefill=each.base[0],
                base_num_decode=each.base[1],
                base_num_fusion=each.base_fusion,
                reason=each.reason,
            )
            for group_id, each in sorted(adjustments.items())
        ],
    )


def pending_from(message: pb.Adjustments) -> list[PendingPlan]:
    """The stored plans that schedules began and that have not ended.

    Plans with a move that this release does not know are left out.
    """
    plans: list[PendingPlan] = []
    for each in message.pending:
        try:
            moves = tuple(map(move_from, each.moves))
        except ValueError:
            continue
        plan = MovePlan(each.scenario, Trigger.SCHEDULE, moves, each.reason, asked_at=each.asked_at)
        plans.append(PendingPlan(plan, each.is_moving and bool(moves)))
    return plans


def _pending_to(left: PendingPlan) -> pb.PendingPlan:
    plan = left.plan
    return pb.PendingPlan(
        scenario=plan.scenario,
        reason=plan.reason,
        asked_at=plan.asked_at,
        is_moving=left.is_moving,
        moves=map(move_to, plan.moves),
    )


def move_to(move: Move) -> pb.PendingMove:
    return pb.PendingMove(
        group_id=move.group_id,
        kind=move.kind.value,
        role=move.role.value if move.role else "",
        to_group=move.to_group or "",
        reason=move.reason,
    )


def move_from(each: pb.PendingMove) -> Move:
    """Raises ValueError if this release does not know the kind, the role, or their combination."""
    role = Role(each.role) if each.role else None
    return Move(each.group_id, MoveKind(each.kind), role, each.to_group or None, each.reason)


def entries_from(lines: Iterable[ScheduleLine]) -> list[ScheduleEntry]:
    """Convert the lines of the part `schedules` of a desired state to entries.

    An entry's name is the line's content, so the name stays if an operator moves the line within
    the file. If two lines are equal, the second gets another name.
    """
    entries: list[ScheduleEntry] = []
    seen: Counter[str] = Counter()
    for line in lines:
        at = " ".join(line.at.split())
        name = f"{at} {line.action} {line.num_groups} of {line.scenario}, {line.pool}"
        seen[name] += 1
        if seen[name] > 1:
            name = f"{name} ({seen[name]})"
        what = ScheduleAction(line.action)
        entries.append(
            ScheduleEntry(name, line.scenario, Cron.parse(at), what, line.num_groups, line.pool)
        )
    return entries
