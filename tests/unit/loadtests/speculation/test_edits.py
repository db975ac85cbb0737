"""The measurement of proposals on answers that are edits of their prompts. Every token is drawn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from loadtests.speculation.edits import Followed, Task, edited, follow, source_lines, tasks

ROOT = Path(__file__).parents[4]


class Perfect:
    """A proposer that proposes the right tokens, or only wrong ones."""

    def __init__(self, answer: list[int], *, is_right: bool) -> None:
        self.answer, self.is_right, self.num_drawn = answer, is_right, 0

    def begin(self, text: Sequence[int], num_drawn: int) -> None:
        assert list(text[-num_drawn:]) == self.answer[:num_drawn]

    def step(self, drawn: Sequence[int]) -> list[int]:
        self.num_drawn += len(drawn)
        assert list(drawn) == self.answer[self.num_drawn - len(drawn) : self.num_drawn]
        return self.answer[self.num_drawn :][:3] if self.is_right else [-1, -1]


@pytest.mark.req("S116")
@pytest.mark.parametrize(("is_right", "num_steps"), [(True, 5), (False, 20)])
def test_a_step_draws_what_it_accepts_and_one_more(is_right: bool, num_steps: int) -> None:
    answer = list(range(21))
    got = follow(Perfect(answer, is_right=is_right), Task([7, 8], answer))
    assert (got.num_drawn, got.num_steps) == (20, num_steps)
    assert got.num_accepted == 20 - num_steps


def test_shares_are_of_what_was_proposed() -> None:
    got = Followed(num_drawn=30, num_steps=10, num_proposed=40, num_accepted=20)
    assert (got.accepted_per_step, got.accepted_share) == (2.0, 0.5)


def test_an_edit_keeps_most_lines_and_changes_some() -> None:
    lines = source_lines(ROOT)[:400]
    got = edited(lines, random.Random(3)).splitlines(keepends=True)
    kept = sum(line in set(lines) for line in got)
    assert 0.7 * len(lines) < kept < len(got) + 1
    assert got != lines
    assert len(got) > 0.9 * len(lines)


def test_a_prompt_has_exactly_the_length_that_is_asked_for() -> None:
    def encode(text: str) -> list[int]:
        return list(text.encode())

    made = tasks(source_lines(ROOT), encode, 5_000, 3)
    assert [len(task.prompt) for task in made] == [5_000] * 3
    assert len({tuple(task.prompt) for task in made}) == 3
