"""A move changes the groups by one step.

An instance joins, leaves or changes its role, or a group is lent.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.model import Role
from pdmesh.core.moves.move import (
    TRAINING_POOL,
    GroupShape,
    Move,
    MoveKind,
    applied,
    inverse,
    serving,
)

P, D = Role.PREFILL, Role.DECODE
CHAT = GroupShape("chat-0", "chat", 3, 5, 0.3, 0.2)
GROUPS = {
    "chat-0": CHAT,
    "chat-1": replace(CHAT, group_id="chat-1", num_prefill=2, num_decode=2),
}


@pytest.mark.req("S28")
def test_the_remaining_instances_carry_the_load_of_the_one_that_leaves() -> None:
    after = applied(GROUPS, Move("chat-0", MoveKind.CHANGE_ROLE, P))["chat-0"]
    assert (after.num_prefill, after.num_decode) == (4, 4)
    assert after.decode_busy == pytest.approx(0.2 * 5 / 4)
    assert after.prefill_busy == pytest.approx(0.3 * 3 / 4)


def test_only_whole_groups_are_lent_and_only_instances_change() -> None:
    for kind in MoveKind:
        is_whole = kind in (MoveKind.LEND, MoveKind.RECLAIM)
        with pytest.raises(ValueError, match=kind.value):
            Move("chat-0", kind, P if is_whole else None)


@pytest.mark.req("S11")
def test_a_lent_group_does_not_serve_until_it_is_reclaimed() -> None:
    lend = Move("chat-0", MoveKind.LEND, None, TRAINING_POOL)
    lent = applied(GROUPS, lend)
    assert [g.group_id for g in serving(lent, "chat")] == ["chat-1"]
    assert applied(lent, inverse(lend, "morning")) == GROUPS
