"""A wrong thinking budget is refused before an engine sees it. The error names the field."""

from __future__ import annotations

import pytest

from pdmesh.core.sampling.constraint import MAX_MARKER
from pdmesh.core.sampling.thinking_budget import MAX_BUDGET, ThinkingBudget, ThinkingMarks
from pdmesh.errors import InvalidRequest

MARKS = ThinkingMarks((7,), (8, 9))


@pytest.mark.parametrize("num_tokens", [0, 1, MAX_BUDGET])
def test_any_number_of_tokens_may_be_reasoning(num_tokens: int) -> None:
    ThinkingBudget(num_tokens, MARKS).check(10)


@pytest.mark.parametrize(
    "budget",
    [
        ThinkingBudget(-1, MARKS),
        ThinkingBudget(MAX_BUDGET + 1, MARKS),
        ThinkingBudget(1, ThinkingMarks((), (8,))),
        ThinkingBudget(1, ThinkingMarks((7,), ())),
        ThinkingBudget(1, ThinkingMarks((7,) * (MAX_MARKER + 1), (8,))),
        ThinkingBudget(1, ThinkingMarks((7,), (10,))),
        ThinkingBudget(1, ThinkingMarks((-1,), (8,))),
    ],
)
def test_a_thinking_budget_that_no_engine_can_enforce_is_refused(budget: ThinkingBudget) -> None:
    with pytest.raises(InvalidRequest) as refused:
        budget.check(10)
    assert refused.value.field == "thinking_token_budget"
