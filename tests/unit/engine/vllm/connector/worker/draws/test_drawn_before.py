"""A request that continues on another engine is shown to vLLM's model runner like a preempted
one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdmesh.engine.vllm.connector.worker.draws.drawn_before import (
    count_as_scheduler_does_not,
    move_drawn_to_output,
)
from pdmesh.engine.vllm.sampling_extras import NUM_DRAWN


class Params(SimpleNamespace):
    def clone(self) -> Params:
        return Params(**vars(self))


def state(num_drawn: int, min_tokens: int = 0) -> Any:
    extra = {NUM_DRAWN: num_drawn} if num_drawn else None
    return SimpleNamespace(
        prompt_token_ids=[1, 2, 3, 4, 5],
        output_token_ids=list[int](),
        num_prompt_tokens=5,
        sampling_params=Params(extra_args=extra, min_tokens=min_tokens),
    )


@pytest.mark.req("S37")
@pytest.mark.parametrize("num_drawn", range(5))
def test_drawn_tokens_become_output_in_order(num_drawn: int) -> None:
    begun = state(num_drawn)
    move_drawn_to_output(begun)
    assert begun.prompt_token_ids + begun.output_token_ids == [1, 2, 3, 4, 5]
    assert len(begun.output_token_ids) == num_drawn
    assert begun.num_prompt_tokens == 5 - num_drawn


def test_min_tokens_counts_the_whole_answer_and_the_copy_in_the_scheduler_stays() -> None:
    begun = state(3, min_tokens=2)
    asked = begun.sampling_params
    move_drawn_to_output(begun)
    assert begun.sampling_params.min_tokens == 5
    assert asked.min_tokens == 2


def test_a_request_that_draws_nothing_is_not_changed() -> None:
    begun = state(0)
    begun.sampling_params = None
    move_drawn_to_output(begun)
    assert begun.prompt_token_ids == [1, 2, 3, 4, 5]


def test_the_runner_drops_no_output_that_the_scheduler_counts_as_prompt() -> None:
    requests = {"a": state(3), "b": state(0)}
    cached = SimpleNamespace(req_ids=["a", "b"], num_output_tokens=[1, 1])
    count_as_scheduler_does_not(requests, cached)
    assert cached.num_output_tokens == [4, 1]
