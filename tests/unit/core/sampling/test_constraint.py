"""Tests where a constraint begins in an answer, and how large it may be."""

from __future__ import annotations

import random

import pytest

from pdmesh.core.sampling.constraint import (
    MAX_MARKER,
    Constraint,
    ConstraintStart,
)
from pdmesh.core.sampling.grammar_limits import MAX_GRAMMAR_BYTES
from pdmesh.errors import InvalidRequest


def test_a_constraint_without_a_marker_begins_at_once() -> None:
    start = ConstraintStart(())
    assert start.has_begun
    assert list(start.after([1, 2])) == [1, 2]


def test_a_constraint_begins_after_its_marker_however_the_text_is_split_into_tokens() -> None:
    answer, marker = [7, 8, 1, 8, 1, 2, 3, 4, 1, 2, 5], [1, 2]
    for cut in range(len(answer) + 1):
        start = ConstraintStart(marker)
        after = [*start.after(answer[:cut]), *start.after(answer[cut:])]
        assert after == [3, 4, 1, 2, 5]


def test_taking_tokens_back_and_feeding_them_again_changes_nothing() -> None:
    rng = random.Random(5)
    for _ in range(300):
        answer = rng.choices((1, 2, 3), k=12)
        expected = ConstraintStart((1, 2)).after(answer)
        start, fed, after = ConstraintStart((1, 2)), 0, list[int]()
        while fed < len(answer):
            step = rng.randint(1, 3)
            after += start.after(answer[fed : fed + step])
            fed = min(len(answer), fed + step)
            back = rng.randint(0, min(fed, 4))
            if num_after := start.take_back(back):
                del after[-num_after:]
            fed -= back * (fed < len(answer) or back > 0)
            if rng.random() < 0.3:
                continue
            after += start.after(answer[fed : fed + 1 + back])
            fed = min(len(answer), fed + 1 + back)
        assert after == list(expected)


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        (Constraint(""), "constraint.grammar"),
        (Constraint("x" * (MAX_GRAMMAR_BYTES + 1)), "constraint.grammar"),
        (Constraint("x", tuple(range(MAX_MARKER + 1))), "constraint.begins_after"),
    ],
)
def test_the_refusal_of_a_value_that_is_too_large_names_its_field(
    constraint: Constraint, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        constraint.check()
    assert caught.value.field == field
