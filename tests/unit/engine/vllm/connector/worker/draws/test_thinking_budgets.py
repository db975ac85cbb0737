"""An answer that continues on another engine keeps the rest of its thinking budget."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, Final

import pytest

pytest.importorskip("vllm.v1.sample.thinking_budget_state")

import torch
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from pdmesh.core.sampling.logit_shaping import LogitShaping
from pdmesh.core.sampling.thinking_budget import ThinkingBudget, ThinkingMarks
from pdmesh.engine.base import Sampling
from pdmesh.engine.vllm.connector.worker.draws.thinking_budgets import ThinkingBudgets
from pdmesh.engine.vllm.host.sampling import sampling_params

pytestmark = pytest.mark.filterwarnings("ignore")  # importing vLLM raises warnings
RUNNER: Final[Any] = SimpleNamespace(max_num_reqs=8, num_spec_tokens=0, device=torch.device("cpu"))
VOCABULARY: Final = 6
MARKS: Final = (
    ThinkingMarks((1,), (2,)),
    ThinkingMarks((1,), (2, 3)),
    ThinkingMarks((1, 4), (2,)),
    ThinkingMarks((1, 1), (2, 3, 2)),
)


def params(budget: int, marks: ThinkingMarks) -> Any:
    shaping = LogitShaping(thinking_token_budget=ThinkingBudget(budget, marks))
    return sampling_params(Sampling(100, shaping=shaping), 100)


def plain(budget: int, marks: ThinkingMarks, prompt: list[int], output: list[int]) -> Any:
    """vLLM's own budget tracker with a request that begins."""
    config: Any = SimpleNamespace(
        reasoning_start_token_ids=list(marks.begin), reasoning_end_token_ids=list(marks.end)
    )
    holder = ThinkingBudgetStateHolder(config, 8, 0, torch.device("cpu"), False)
    asked: Any = SimpleNamespace(thinking_token_budget=budget)
    holder.sync_batch(BatchUpdate(1, (), ((0, asked, prompt, output),), ()))
    return holder


def joined(budget: int, marks: ThinkingMarks, prompt: list[int], output: list[int]) -> Any:
    """Our budget tracker with a request that continues after `output`."""
    budgets = ThinkingBudgets(RUNNER)
    added = ((0, params(budget, marks), prompt, output),)
    budgets.sync_batch(BatchUpdate(1, (), added, ()))
    return budgets


def forced(holder: Any, output: list[int]) -> int | None:
    """The only token that may be drawn next. None means that any token may be drawn."""
    logits = torch.zeros(1, VOCABULARY)
    holder.update_state([output], [[]])
    (row,) = holder.apply_to_logits(logits, False, [[]]).tolist()
    highest: int = max(range(VOCABULARY), key=row.__getitem__)
    return highest if row[highest] > 0 else None


@pytest.mark.req("S37")
@pytest.mark.parametrize("marks", MARKS)
def test_an_answer_cut_anywhere_gets_the_same_forced_tokens_as_an_uncut_one(
    marks: ThinkingMarks,
) -> None:
    rng = random.Random(5)
    num_forced = 0
    for _ in range(150):
        prompt = rng.choices(range(VOCABULARY), k=rng.randrange(1, 8))
        budget = rng.randrange(8)
        uncut, output = plain(budget, marks, prompt, []), list[int]()
        elsewhere = [joined(budget, marks, prompt, output)]
        for _ in range(30):
            expected = forced(uncut, output)
            assert [forced(each, output) for each in elsewhere] == [expected] * len(elsewhere)
            num_forced += expected is not None
            output.append(rng.randrange(VOCABULARY) if expected is None else expected)
            elsewhere.append(joined(budget, marks, prompt, list(output)))
    assert num_forced > 50


def test_a_long_answer_is_not_replayed_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    output = [1, *[5] * 20_000]
    going_on = joined(30_000, MARKS[0], [5], output)
    looks: list[int] = []
    rule = ThinkingBudgetStateHolder._update_think_state

    def looked(self: Any, state: dict[str, Any]) -> None:
        looks.append(len(state["output_tok_ids"]))
        rule(self, state)

    monkeypatch.setattr(ThinkingBudgetStateHolder, "_update_think_state", looked)
    assert forced(going_on, output) is None
    assert len(looks) < 10


def test_requests_keep_their_budgets_as_the_batch_moves() -> None:
    short, long = params(0, MARKS[0]), params(9, MARKS[1])
    without: Any = sampling_params(Sampling(100), 100)
    budgets, thinking = ThinkingBudgets(RUNNER), [1]
    all_params = (without, short, long)
    added: Any = [(at, each, thinking, list[int]()) for at, each in enumerate(all_params)]
    budgets.sync_batch(BatchUpdate(3, (), added, ()))
    outputs: list[list[int]] = [[], [], []]
    budgets.update_state(outputs, [[], [], []])
    logits = budgets.apply_to_logits(torch.zeros(3, VOCABULARY), False, [[], [], []])
    assert [row.tolist().count(0) for row in logits] == [VOCABULARY, VOCABULARY - 1, VOCABULARY]
    budgets.sync_batch(BatchUpdate(1, (0, 1), (), ()))
    assert budgets.has_tracked_requests()
    budgets.sync_batch(BatchUpdate(0, (2,), (), ()))
    assert not budgets.has_tracked_requests()
