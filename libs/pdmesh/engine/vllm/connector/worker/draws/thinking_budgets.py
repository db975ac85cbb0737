"""Keeps an answer within its thinking budget, even if several engines draw its tokens.

A thinking budget limits the tokens that a model draws between the marks of its reasoning. vLLM has
a rule for this, takes the marks from the engine's settings, and follows an answer from its first
token on. In the mesh, the marks come with each request, because the gateway knows the model's
reasoning parser. When an answer continues on this engine, vLLM's rule also sees the tokens that
other engines drew, as if this engine had drawn them one by one.

This module patches vLLM's older model runner.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Final

from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from pdmesh.core.sampling.thinking_budget import ThinkingBudget, ThinkingMarks
from pdmesh.engine.vllm.host.sampling import thinking_budget_of

_UNLIMITED: Final = SimpleNamespace(thinking_token_budget=None)


def keep_thinking_budgets() -> None:
    """Patch the model runner of this process. Idempotent."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    update = GPUModelRunner._update_states
    if getattr(update, "keeps_budgets", False):
        return

    @functools.wraps(update)
    def update_with_budgets(runner: Any, scheduler_output: Any) -> Any:
        batch = runner.input_batch
        if batch.thinking_budget_state_holder is None and any(
            thinking_budget_of(new.sampling_params) is not None
            for new in scheduler_output.scheduled_new_reqs
        ):
            batch.thinking_budget_state_holder = ThinkingBudgets(runner)
        return update(runner, scheduler_output)

    update_with_budgets.keeps_budgets = True  # type: ignore[attr-defined]
    GPUModelRunner._update_states = update_with_budgets


class ThinkingBudgets:
    """Replaces vLLM's holder of thinking budgets, and has one such holder for each set of marks.

    An engine has one model, so there is only one holder unless a gateway changes its parser.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._holders: dict[ThinkingMarks, ReplayingHolder] = {}

    def has_tracked_requests(self) -> bool:
        return bool(self._holders)

    def sync_batch(self, update: BatchUpdate | None) -> None:
        if not update:
            return
        budgets = [thinking_budget_of(params) for _, params, _, _ in update.added]
        for budget in budgets:
            if budget is not None and budget.marks not in self._holders:
                self._holders[budget.marks] = ReplayingHolder(budget.marks, self._runner)
        for marks, holder in list(self._holders.items()):
            holder.sync_batch(_of_marks(update, budgets, marks))
            if not holder.has_tracked_requests():
                del self._holders[marks]

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        for holder in self._holders.values():
            holder.update_state(*args, **kwargs)

    def apply_to_logits(self, logits: Any, *args: Any, **kwargs: Any) -> Any:
        for holder in self._holders.values():
            logits = holder.apply_to_logits(logits, *args, **kwargs)
        return logits


class ReplayingHolder(ThinkingBudgetStateHolder):
    """vLLM's holder, extended for requests that begin with output drawn elsewhere."""

    def __init__(self, marks: ThinkingMarks, runner: Any) -> None:
        config = SimpleNamespace(
            reasoning_start_token_ids=list(marks.begin), reasoning_end_token_ids=list(marks.end)
        )
        super().__init__(
            config,
            runner.max_num_reqs,
            runner.num_spec_tokens,
            runner.device,
            is_pin_memory=False,
        )

    @staticmethod
    def _find_last_sequence_index(target_list: list[int], token_ids: list[int]) -> int:
        """Like vLLM's method, but as fast as a list's own search."""
        if not token_ids:
            return -1
        backwards, last = target_list[::-1], token_ids[-1]
        at = -1
        while True:
            try:
                at = backwards.index(last, at + 1)
            except ValueError:
                return -1
            begin = len(target_list) - at - len(token_ids)
            if begin >= 0 and target_list[begin : begin + len(token_ids)] == token_ids:
                return begin

    def _update_think_state(self, state: dict[str, Any]) -> None:
        if not state.get("is_followed"):
            state["is_followed"] = True
            self._follow(state)
        super()._update_think_state(state)

    def _follow(self, state: dict[str, Any]) -> None:
        """Replay the drawn tokens of a new request, up to the one before the last."""
        drawn, proposed = state["output_tok_ids"], state["spec_token_ids"]
        state["spec_token_ids"] = []
        for num in self._telling(state, drawn):
            state["output_tok_ids"], state["force_index"] = drawn[:num], []
            super()._update_think_state(state)
        state["output_tok_ids"], state["spec_token_ids"] = drawn, proposed
        state["force_index"] = []

    def _telling(self, state: dict[str, Any], drawn: Sequence[int]) -> Iterator[int]:
        """Yields each length n such that vLLM's rule must see the first n drawn tokens.

        At most tokens, the rule only counts down, so they are skipped. At a mark and at the end of
        the budget, the rule does more. It must see the answer up to such a token, and also up to
        the token before.
        """
        begins, ends = self.think_start_token_ids, self.think_end_token_ids
        num = 0
        while num < len(drawn):
            yield num
            if state["in_end"]:
                num += 1
                continue
            is_thinking = state["start_thinking"] != -1
            marks = set[int]() if is_thinking else {begins[-1]}
            if state["end_thinking"] == -1:
                marks.add(ends[-1])
            nearest = [at for mark in marks if (at := _index(drawn, mark, num)) is not None]
            if is_thinking:
                nearest.append(state["prev_output_length"] + state["check_count_down"] - 1)
            if not nearest:
                return
            num = max(num + 1, min(nearest))


def _index(drawn: Sequence[int], token_id: int, start: int) -> int | None:
    try:
        return drawn.index(token_id, start)
    except ValueError:
        return None


def _of_marks(
    update: BatchUpdate, budgets: Sequence[ThinkingBudget | None], marks: ThinkingMarks
) -> BatchUpdate:
    """The update for one set of marks. Added requests with other marks count as unlimited."""
    added = [
        (
            index,
            _UNLIMITED
            if budget is None or budget.marks != marks
            else SimpleNamespace(thinking_token_budget=budget.num_tokens),
            prompt,
            output,
        )
        for (index, _, prompt, output), budget in zip(update.added, budgets, strict=True)
    ]
    return BatchUpdate(update.batch_size, update.removed, added, update.moved)
