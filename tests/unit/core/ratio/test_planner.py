"""The planner finds the cheapest move that helps, and the moves that lead to a given split."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.model import Role
from pdmesh.core.moves.move import GroupShape, Move, MoveKind, applied
from pdmesh.core.moves.move_refusal import refusal
from pdmesh.core.ratio.planner import MoveChoice, PlannerLimits, changes_to, next_move
from pdmesh.core.ratio.throughput import Split

P, D = Role.PREFILL, Role.DECODE

GROUP = GroupShape("g0", "chat", 3, 5, 0.4, 0.6)


def test_a_blank_instance_is_taken_if_the_other_role_has_none_to_spare() -> None:
    tight = {"g0": replace(GROUP, prefill_busy=0.9, decode_busy=0.8)}
    choice = next_move(P, "chat", tight, 1, PlannerLimits(), "why")
    assert choice.move == Move("g0", MoveKind.ADD, P, None, "why")
    choice = next_move(P, "chat", tight, 0, PlannerLimits(), "why")
    assert choice.move is None
    assert choice.reasons == (
        "change_role: the other decodes would be 100% busy",
        "add: no blank instance",
    )


def test_without_a_blank_instance_one_of_another_group_of_the_model_is_moved() -> None:
    groups = {
        "g0": replace(GROUP, prefill_busy=0.9, decode_busy=0.8, model="m"),
        "idle": GroupShape("idle", "code", 4, 4, 0.1, 0.1, model="m"),
        "other": GroupShape("other", "code", 4, 4, 0.0, 0.0, model="n"),
    }
    choice = next_move(P, "chat", groups, 0, PlannerLimits(), "why")
    assert choice.move == Move("idle", MoveKind.MOVE, P, "g0", "why")


def test_a_role_change_that_would_only_move_the_bottleneck_is_no_candidate() -> None:
    """Two decodes are 60 % busy. One decode alone would be 120 % busy, so decodes would then be
    short.
    """
    choice = next_move(
        P, "chat", {"g0": replace(GROUP, num_decode=2, prefill_busy=0.9)}, 0, PlannerLimits(), ""
    )
    assert choice.move is None


@pytest.mark.parametrize("split", [Split(p, d) for p in range(1, 7) for d in range(1, 7)])
def test_changes_lead_from_the_present_split_to_the_wanted_one(split: Split) -> None:
    groups = {"g0": GROUP}
    moves = changes_to(split, GROUP, "")
    for move in moves:
        groups = applied(groups, move)
    assert (groups["g0"].num_prefill, groups["g0"].num_decode) == (
        split.num_prefill,
        split.num_decode,
    )
    assert len(moves) == max(
        abs(split.num_prefill - 3), abs(split.num_decode - 5), abs(split.total - 8)
    )


@pytest.mark.req("S58")
def test_a_ratio_takes_instances_only_from_its_own_region() -> None:
    """The other region has a group with room and blank instances. Neither can help in this
    region.
    """
    short = GroupShape("a", "chat", 2, 2, 0.95, 0.9, region="eu", num_blank=0)
    idle = GroupShape("b", "chat", 3, 3, 0.1, 0.1, region="us", num_blank=4)
    near = replace(idle, group_id="c", region="eu", num_blank=0)

    def step(*groups: GroupShape) -> MoveChoice:
        named = {group.group_id: group for group in groups}
        return next_move(Role.PREFILL, "chat", named, 4, PlannerLimits(), "too slow")

    assert step(short, idle).move is None
    assert "add: no blank instance in region eu" in step(short, idle).reasons
    moved = step(short, idle, near).move
    assert moved is not None
    assert (moved.kind, moved.group_id, moved.to_group) == (MoveKind.MOVE, "c", "a")
    asked = Move("b", MoveKind.MOVE, Role.PREFILL, "a")
    assert refusal(asked, {"a": short, "b": idle}, 0.9) == "group a is in another region"
