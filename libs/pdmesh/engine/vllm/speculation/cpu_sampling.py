"""Mends how vLLM 0.32 draws with proposals on a CPU at a temperature above 0.

Each checked token needs the temperature, `top_k` and `top_p` of its request. vLLM's CPU kernel
writes them to a copy that nobody reads, unless they are 64-bit integers. So logits were divided by
what the memory held before, and a `top_k` ended the engine. A `top_k` ended it also in a step that
checks no token at all.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def expand_on_cpu() -> None:
    """Patch the rejection sampler of this process. Idempotent."""
    from vllm.v1.sample import rejection_sampler

    # Any: functions of vLLM's, replaced.
    sampler: Any = rejection_sampler
    constrain = sampler.apply_sampling_constraints
    if getattr(constrain, "takes_none", False):
        return

    @functools.wraps(constrain)
    def constrain_if_any(logits: torch.Tensor, *args: Any) -> Any:
        return constrain(logits, *args) if logits.shape[0] else logits

    constrain_if_any.takes_none = True  # type: ignore[attr-defined]
    sampler.apply_sampling_constraints = constrain_if_any
    sampler.expand_batch_to_tokens = expanded


def expanded(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Each request's value, once for each of its tokens; `cu_num_tokens` adds their numbers up."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = x.masked_fill(x == replace_from, replace_to)
    return values.repeat_interleave(counts, output_size=num_tokens)
