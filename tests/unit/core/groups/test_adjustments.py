"""Adjustments are changes that plans of moves made to the desired counts.

An adjustment lasts until an operator changes the same counts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.groups.adjustments import (
    Adjustment,
    CannotMove,
    adjusted,
    after,
    group_shapes,
    num_lent,
)
from pdmesh.core.groups.desired import Desired, Group
from pdmesh.core.model import Role
from pdmesh.core.moves.move import Move, MoveKind, inverse
from pdmesh.services.master_scheduler.groups.desired_convert import adjustments_from, adjustments_to

DESIRED = Desired(
    groups={
        "a": Group("chat", 2, 2),
        "b": Group("chat", 2, 2),
        "f": Group("other", 0, 0, fusion=2),
    }
)
CHANGE = Move("a", MoveKind.CHANGE_ROLE, Role.PREFILL, reason="T_p grew")
LEND = Move("b", MoveKind.LEND, None, "training", "night")


@pytest.mark.req("S27", "S28")
def test_a_move_changes_the_desired_counts_and_its_inverse_restores_them() -> None:
    known = after(CHANGE, DESIRED, {})
    assert known == {"a": Adjustment(3, 1, (2, 2), "", "T_p grew")}
    shall = adjusted(DESIRED, known)
    assert (shall.groups["a"].prefill, shall.groups["a"].decode) == (3, 1)
    assert shall.groups["b"] == DESIRED.groups["b"]
    assert after(inverse(CHANGE, "harm"), DESIRED, known) == {}


@pytest.mark.req("S11")
def test_a_lent_group_is_no_longer_desired_and_its_instances_are_reserved() -> None:
    known = after(LEND, DESIRED, {})
    assert sorted(adjusted(DESIRED, known).groups) == ["a", "f"]
    assert num_lent(DESIRED, known) == {"": 4}
    states = group_shapes(DESIRED, known, lambda group_id, role: 0.5)
    assert [states[g].pool for g in ("a", "b")] == ["", "training"]
    assert not states["f"].has_ratio
    back = after(Move("b", MoveKind.RECLAIM, None, None, "morning"), DESIRED, known)
    assert back == {}


@pytest.mark.req("S11")
def test_a_fusion_group_stays_lent_until_an_operator_changes_its_count() -> None:
    lend = Move("f", MoveKind.LEND, None, "training", "night")
    known = adjustments_from(adjustments_to(after(lend, DESIRED, {}), {}, [], 1))
    assert sorted(adjusted(DESIRED, known).groups) == ["a", "b"]
    assert num_lent(DESIRED, known) == {"": 2}
    changed = replace(DESIRED, groups={**DESIRED.groups, "f": Group("other", 0, 0, fusion=3)})
    assert adjusted(changed, known).groups["f"].fusion == 3
    assert after(Move("f", MoveKind.RECLAIM, None), DESIRED, known) == {}


def test_an_instance_moves_between_groups() -> None:
    known = after(Move("a", MoveKind.MOVE, Role.DECODE, "b", "busy"), DESIRED, {})
    groups = adjusted(DESIRED, known).groups
    assert [(groups[g].prefill, groups[g].decode) for g in "ab"] == [(2, 1), (2, 3)]


def test_an_operator_who_changes_the_counts_has_the_last_word() -> None:
    known = {**after(CHANGE, DESIRED, {}), **after(LEND, DESIRED, {})}
    changed = replace(DESIRED, groups={**DESIRED.groups, "a": Group("chat", 4, 2)})
    assert adjusted(changed, known).groups["a"] == Group("chat", 4, 2)
    assert "b" not in adjusted(changed, known).groups
    without = replace(DESIRED, groups={"a": DESIRED.groups["a"]})
    assert num_lent(without, known) == {}


@pytest.mark.parametrize(
    ("move", "why"),
    [
        (Move("gone", MoveKind.ADD, Role.PREFILL), "no group gone"),
        (Move("a", MoveKind.MOVE, Role.DECODE, "gone"), "no group gone"),
        (Move("f", MoveKind.ADD, Role.PREFILL), "group f has no prefills"),
        (Move("a", MoveKind.MOVE, Role.DECODE, "f"), "group f has no prefills"),
    ],
)
def test_a_move_without_room_in_the_desired_state_is_refused(move: Move, why: str) -> None:
    with pytest.raises(CannotMove, match=why):
        after(move, DESIRED, {})
