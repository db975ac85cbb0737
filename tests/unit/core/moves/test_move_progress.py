"""Tests when a move is complete, has failed or still waits, by the reports about its groups."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.moves.move_progress import TouchedGroup, progress_of
from pdmesh.core.moves.next_move import MoveEnded, MoveSeen

MADE = TouchedGroup((2, 4), (2, 4), is_reported=True, is_serving=True)
GONE = TouchedGroup(None, None)
WAITS = replace(MADE, is_serving=False, lacks="1 decode")


@pytest.mark.req("S21", "S28")
@pytest.mark.parametrize("touched", [[MADE], [GONE], [MADE, MADE], [MADE, GONE]])
def test_a_move_is_made_when_all_its_groups_serve_or_have_left(
    touched: list[TouchedGroup],
) -> None:
    assert progress_of("chat", touched) == MoveEnded("chat", is_done=True)


@pytest.mark.parametrize(
    "late",
    [
        replace(MADE, wanted=(3, 3)),  # the report is about the counts from before the move
        replace(MADE, wanted=None),
        replace(MADE, shall_be=None),  # the group is to leave, and still serves
        replace(GONE, is_reported=True),
        replace(MADE, is_reported=False),
        replace(MADE, wanted=(3, 3), is_serving=False, is_failed=True, detail="died"),
        replace(MADE, wanted=(3, 3), is_serving=False, lacks="1 prefill"),
    ],
)
def test_what_is_said_of_other_counts_says_nothing_of_the_move(late: TouchedGroup) -> None:
    assert progress_of("chat", [MADE, late]) == MoveSeen("chat", "")


def test_a_failed_group_fails_the_move_with_its_own_reason() -> None:
    failed = replace(MADE, is_serving=False, is_failed=True, detail="no memory")
    expected = MoveEnded("chat", is_done=False, detail="no memory")
    assert progress_of("chat", [MADE, failed]) == expected
    assert progress_of("chat", [failed, WAITS]) == expected


def test_a_move_only_lacks_instances_if_all_its_unfinished_groups_do() -> None:
    other = replace(WAITS, lacks="1 prefill")
    assert progress_of("chat", [WAITS, other]) == MoveSeen("chat", "1 decode; 1 prefill")
    assert progress_of("chat", [MADE, WAITS]) == MoveSeen("chat", "1 decode")
    assert progress_of("chat", [WAITS, replace(WAITS, lacks="")]) == MoveSeen("chat", "")
