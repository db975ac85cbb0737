"""The maximum length of an answer."""

from __future__ import annotations

import pytest

from pdmesh.core.sampling.answer_length import max_answer_tokens


@pytest.mark.parametrize(
    ("asked", "room", "num_tokens"),
    [(None, 100, 16), (None, 10, 10), (7, 10, 7), (10, 10, 10), (11, 10, None), (90, 100, 90)],
)
def test_the_default_is_cut_to_the_context_and_the_clients_number_is_not(
    asked: int | None, room: int, num_tokens: int | None
) -> None:
    assert max_answer_tokens(asked, 16, room) == num_tokens
