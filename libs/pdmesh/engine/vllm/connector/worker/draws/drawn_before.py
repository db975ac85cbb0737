"""Makes vLLM count tokens that another engine drew as output of the answer, not as prompt.

In the mesh, an answer continues in another engine request at decode, and again after a migration to
another instance. vLLM's penalties, `min_tokens`, `bad_words` and seeded draws look at the tokens
that an engine request has drawn. So a request that continues an answer begins in the model runner
as if it had been preempted. The request's prompt ends where the answer begins, and the tokens drawn
so far are the request's output. The scheduler still counts these tokens as prompt.

This module patches vLLM's older model runner, the only one that computes on a CPU.
"""

from __future__ import annotations

import functools
from typing import Any

from pdmesh.engine.vllm.sampling_extras import num_drawn_before


def count_drawn_as_output() -> None:
    """Patch the model runner of this process. Idempotent."""
    from vllm.v1.worker.gpu_input_batch import CachedRequestState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    begin, update = CachedRequestState.__post_init__, GPUModelRunner._update_states
    if getattr(begin, "counts_drawn", False):
        return

    @functools.wraps(begin)
    def begin_with_output(state: Any) -> None:
        begin(state)
        move_drawn_to_output(state)

    @functools.wraps(update)
    def update_with_output(runner: Any, scheduler_output: Any) -> Any:
        count_as_scheduler_does_not(runner.requests, scheduler_output.scheduled_cached_reqs)
        return update(runner, scheduler_output)

    begin_with_output.counts_drawn = True  # type: ignore[attr-defined]
    CachedRequestState.__post_init__ = begin_with_output
    GPUModelRunner._update_states = update_with_output


def move_drawn_to_output(state: Any) -> None:
    """Move the tokens that were drawn elsewhere from a request's prompt to its output.

    `state` is vLLM's own state of a request that begins. It has the whole prompt.
    """
    num = num_drawn_before(state.sampling_params)
    if not num or state.prompt_token_ids is None:
        return
    state.output_token_ids[:0] = state.prompt_token_ids[-num:]
    state.prompt_token_ids = state.prompt_token_ids[:-num]
    state.num_prompt_tokens -= num
    if state.sampling_params.min_tokens:  # counts only tokens that this engine request draws
        state.sampling_params = state.sampling_params.clone()
        state.sampling_params.min_tokens += num


def count_as_scheduler_does_not(requests: Any, cached: Any) -> None:
    """Add the tokens that were drawn elsewhere to the scheduler's counts of output tokens.

    The scheduler leaves these tokens out, but the runner compares its own counts with the
    scheduler's. `cached` has the scheduler's counts for running requests.
    """
    for index, request_id in enumerate(cached.req_ids):
        if num := num_drawn_before(requests[request_id].sampling_params):
            cached.num_output_tokens[index] += num
