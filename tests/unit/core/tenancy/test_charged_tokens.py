"""The number of tokens that an ended call costs its tenant."""

from __future__ import annotations

import pytest

from pdmesh.core.tenancy.charged_tokens import ChoiceUse, tokens_of_answers, tokens_of_inputs

WHOLE = ChoiceUse(num_tokens=5, num_taken=3, was_accepted=True, has_failed=False)
FAILED = ChoiceUse(num_tokens=5, num_taken=3, was_accepted=True, has_failed=True)
REFUSED = ChoiceUse(num_tokens=0, num_taken=0, was_accepted=False, has_failed=True)


@pytest.mark.parametrize(
    ("choices", "num_tokens"),
    [
        ([WHOLE], 15),
        ([WHOLE, WHOLE], 20),
        ([WHOLE, FAILED], 16),
        ([REFUSED], 0),
        ([REFUSED, WHOLE], 13),
    ],
)
def test_a_call_that_fails_costs_what_its_client_got(
    choices: list[ChoiceUse], num_tokens: int
) -> None:
    assert tokens_of_answers(10, choices, is_void=False) == num_tokens
    assert tokens_of_answers(10, choices, is_void=True) == 0, "its client got only an error"


def test_a_client_that_leaves_pays_for_the_inputs_that_were_begun() -> None:
    assert tokens_of_inputs("completed", [3, 4, 5], []) == 12
    assert tokens_of_inputs("failed", [3, 4, 5], [0, 1]) == 0
    assert tokens_of_inputs("cancelled", [3, 4, 5], [0, 2, 2]) == 8
