"""Converts moves and decisions about ratios between the core's types and protobuf messages.

A ratio is the ratio of prefills to decodes in a group.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from pdmesh.core.moves.move import GroupShape, Move, MoveKind
from pdmesh.core.ratio.controller import RatioDecided
from pdmesh.core.ratio.throughput import Profile
from pdmesh.errors import InvalidRequest
from pdmesh.services.master_scheduler.groups.desired_convert import move_from, move_to
from pdmesh.v1 import admin_service_pb2 as pb

MAX_MOVES: Final = 256  # the most moves in a plan of an operator


def moves_from(request: pb.PlanMovesRequest, reason: str) -> tuple[Move, ...]:
    """The moves that an operator asks for. Raises InvalidRequest.

    The number of moves is bounded, because each move is checked against all groups.
    """
    if len(request.moves) > MAX_MOVES:
        raise InvalidRequest(f"more than {MAX_MOVES} moves", field="moves")
    moves: list[Move] = []
    for number, each in enumerate(request.moves):
        field = f"moves[{number}]"
        try:
            move = move_from(each)
        except ValueError as exc:
            raise InvalidRequest(f"{field}: {exc}", field=field) from exc
        if move.role is None:
            raise InvalidRequest(f"{field}: only schedules lend groups", field=field)
        if (move.kind is MoveKind.MOVE) is not bool(move.to_group):
            raise InvalidRequest(
                f"{field}: to_group is only for {MoveKind.MOVE.value}", field=field
            )
        moves.append(replace(move, reason=reason))
    return tuple(moves)


def profile_from(message: pb.ScenarioProfile) -> Profile:
    """Check and convert a profile. Raises InvalidRequest."""
    for name in ("t_p_s", "num_prefill_slots", "t_d_s", "num_decode_slots"):
        value = getattr(message, name)
        if not (math.isfinite(value) and value > 0):
            raise InvalidRequest("must be a positive number", field=f"profile.{name}")
    return Profile(
        message.t_p_s, message.num_prefill_slots, message.t_d_s, message.num_decode_slots
    )


def decision_to(decided: RatioDecided, at: float) -> pb.RatioDecision:
    """Convert a decision that was made at the unix time `at`."""
    window = decided.window
    message = pb.RatioDecision(
        scenario=decided.scenario,
        action=decided.action.value,
        reason=decided.reason,
        moves=map(move_to, decided.moves),
        e2e_s=window.e2e_s if window else None,
        prefill_share=window.prefill_share if window else None,
        groups=map(_load_to, decided.groups),
    )
    message.decided_at.FromMilliseconds(int(1000 * at))
    return message


def _load_to(group: GroupShape) -> pb.GroupLoad:
    return pb.GroupLoad(
        group_id=group.group_id,
        num_prefill=group.num_prefill,
        num_decode=group.num_decode,
        prefill_busy=group.prefill_busy,
        decode_busy=group.decode_busy,
    )


def shape_fields(group: GroupShape) -> dict[str, str | int | float | None]:
    """The fields of a group's shape, for the log."""
    return {
        "group_id": group.group_id,
        "num_prefill": group.num_prefill,
        "num_decode": group.num_decode,
        "prefill_busy": group.prefill_busy,
        "decode_busy": group.decode_busy,
    }


def move_text(move: Move) -> str:
    parts = (move.group_id, move.kind.value, move.role.value if move.role else "", move.to_group)
    return " ".join(part for part in parts if part)
