"""The reasons to refuse a move.

No sequence of allowed moves takes a group's last instance of a role or overloads the other
instances.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from pdmesh.core.moves.move_refusal import MAX_BUSY, MIN_PER_SCENARIO, refusal

P, D = Role.PREFILL, Role.DECODE
CHAT = GroupShape("chat-0", "chat", 3, 5, 0.3, 0.2)
GROUPS = {
    "chat-0": CHAT,
    "chat-1": replace(CHAT, group_id="chat-1", num_prefill=2, num_decode=2),
    "code-0": GroupShape("code-0", "code", 2, 2, 0.1, 0.1),
}


def to_prefill(group_id: str = "chat-0") -> Move:
    return Move(group_id, MoveKind.CHANGE_ROLE, P)


@pytest.mark.req("S28")
def test_a_move_that_would_overload_the_remaining_instances_is_refused() -> None:
    """A planner that checks the load before the move oscillates: dynamo#9294 went back and forth
    between 2 and 1 instances.
    """
    busy = {**GROUPS, "chat-1": replace(GROUPS["chat-1"], decode_busy=0.6)}
    assert refusal(to_prefill("chat-1"), busy, MAX_BUSY) == "1 decode of chat-1 would be 120% busy"
    assert refusal(to_prefill("chat-1"), busy, MAX_BUSY, is_forced=True) is None


@pytest.mark.req("S28")
def test_an_unknown_load_refuses_a_move_and_does_not_count_as_idle() -> None:
    """In dynamo#14575, an outage of the metrics was taken for an idle system."""
    unknown = {**GROUPS, "chat-0": replace(CHAT, decode_busy=None)}
    assert "unknown" in (refusal(to_prefill(), unknown, MAX_BUSY) or "")


@pytest.mark.req("S31")
def test_no_scenario_is_left_with_a_single_instance_of_a_role() -> None:
    move = Move("code-0", MoveKind.CHANGE_ROLE, P)
    assert refusal(move, GROUPS, MAX_BUSY) == "scenario code would depend on a single decode"
    assert refusal(move, GROUPS, MAX_BUSY, is_forced=True) is None


@pytest.mark.req("S28")
def test_not_even_force_takes_a_groups_last_instance_of_a_role() -> None:
    thin = {"chat-0": replace(CHAT, num_decode=1)}
    why = refusal(to_prefill(), thin, MAX_BUSY, is_forced=True)
    assert why == "group chat-0 would have no decode"


@pytest.mark.parametrize(
    ("move", "why"),
    [
        (Move("gone", MoveKind.REMOVE, P), "there is no group gone"),
        (Move("chat-0", MoveKind.ADD, P), "no blank instance"),
        (Move("chat-0", MoveKind.MOVE, P, "gone"), "group gone does not serve"),
        (Move("chat-0", MoveKind.RECLAIM, None), "group chat-0 is not lent"),
        (
            Move("code-0", MoveKind.LEND, None, TRAINING_POOL),
            "code-0 is the last group of scenario code",
        ),
        (Move("chat-0", MoveKind.LEND, None, TRAINING_POOL), None),
    ],
)
def test_a_refusal_names_its_reason(move: Move, why: str | None) -> None:
    assert refusal(move, GROUPS, MAX_BUSY) == why


@pytest.mark.req("S11")
def test_a_group_is_lent_only_if_the_others_carry_its_traffic() -> None:
    lend = Move("chat-0", MoveKind.LEND, None, TRAINING_POOL)
    busy = {**GROUPS, "chat-0": replace(CHAT, decode_busy=0.6)}
    assert "decodes would be 170% busy" in (refusal(lend, busy, MAX_BUSY) or "")
    lent = applied(GROUPS, lend)
    assert [g.group_id for g in serving(lent, "chat")] == ["chat-1"]
    assert applied(lent, inverse(lend, "morning")) == GROUPS


@pytest.mark.req("S11", "S31")
def test_one_of_two_groups_is_lent_if_the_scenario_allows_a_single_instance_per_role() -> None:
    pair = GroupShape("a", "chat", 1, 1, 0.0, 0.0)
    lend = Move("a", MoveKind.LEND, None, TRAINING_POOL)
    groups = {"a": pair, "b": replace(pair, group_id="b")}
    assert "depend on a single prefill" in (refusal(lend, groups, MAX_BUSY) or "")
    allowed = {i: replace(group, allows_single=True) for i, group in groups.items()}
    assert refusal(lend, allowed, MAX_BUSY) is None
    last = refusal(Move("b", MoveKind.LEND, None), applied(allowed, lend), MAX_BUSY)
    assert last == "b is the last group of scenario chat"
    two = {"a": replace(pair, num_decode=2, allows_single=True)}
    assert refusal(Move("a", MoveKind.REMOVE, D), two, MAX_BUSY) is None


@pytest.mark.req("S11", "S32")
def test_fusion_instances_carry_both_roles_and_are_counted_with_their_load() -> None:
    fusion = GroupShape("f", "chat", 0, 0, num_fusion=2, fusion_busy=0.5)
    groups = {"f": fusion, "g": replace(fusion, group_id="g")}
    lend = Move("f", MoveKind.LEND, None, TRAINING_POOL)
    assert "would be 100% busy" in (refusal(lend, groups, MAX_BUSY) or "")
    idle = {i: replace(group, fusion_busy=0.2) for i, group in groups.items()}
    assert refusal(lend, idle, MAX_BUSY) is None
    unknown = {**idle, "g": replace(fusion, group_id="g", fusion_busy=None)}
    assert refusal(lend, unknown, MAX_BUSY) == "the load of g's fusions is unknown"
    beside = {"f": replace(fusion, fusion_busy=0.1), "p": replace(CHAT, group_id="p")}
    assert refusal(lend, beside, MAX_BUSY) is None
    assert refusal(Move("f", MoveKind.ADD, P), beside, MAX_BUSY, num_blank=1) is not None


@pytest.mark.req("S28", "S31")
@given(
    counts=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=3),
    busy=st.floats(0, 1),
    moves=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from([MoveKind.CHANGE_ROLE, MoveKind.REMOVE, MoveKind.MOVE]),
            st.sampled_from([P, D]),
            st.integers(0, 2),
        ),
        max_size=30,
    ),
)
def test_for_any_order_each_group_keeps_both_roles_without_an_overload(
    counts: list[tuple[int, int]],
    busy: float,
    moves: list[tuple[int, MoveKind, Role, int]],
) -> None:
    groups = {f"g{i}": GroupShape(f"g{i}", "s", *c, busy, busy) for i, c in enumerate(counts)}
    before = {role: sum(g.num(role) for g in groups.values()) for role in (P, D)}
    for at, kind, role, to in moves:
        move = Move(f"g{at}", kind, role, f"g{to}" if kind is MoveKind.MOVE else None)
        if refusal(move, groups, MAX_BUSY) is None:
            groups = applied(groups, move)
            if kind in (MoveKind.CHANGE_ROLE, MoveKind.MOVE) and at != to:
                assert applied(groups, inverse(move, "back")).keys() == groups.keys()
    for group in groups.values():
        for role in (P, D):
            assert group.num(role) >= 1
            assert (group.busy(role) or 0) <= max(busy, MAX_BUSY) + 1e-9
    for role in (P, D):
        total = sum(g.num(role) for g in groups.values())
        assert total >= min(before[role], MIN_PER_SCENARIO)
