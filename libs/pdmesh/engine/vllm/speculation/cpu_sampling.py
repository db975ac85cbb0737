"""Mends how vLLM 0.32 draws with proposals on a CPU at a temperature above 0.

Each checked token needs the temperature, `top_k` and `top_p` of its request. vLLM's CPU kernel
writes them to a copy that nobody reads, unless they are 64-bit integers. So logits were divided by
what the memory held before, and a `top_k` ended the engine. A `top_k` ended it also in a step that
checks no token at all.

For each request that draws, vLLM also makes as many random numbers as the vocabulary has tokens,
to replace a proposed token that is refused, though nothing may be proposed for it. On a CPU these
cost more than the rest of the check: a batch of 32 was slowed by a fifth.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch


def mend_drawing_on_cpu() -> None:
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
    sampler.sample_recovered_tokens = only_where_proposed(sampler.sample_recovered_tokens)


def only_where_proposed(recover: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`recover` (vLLM's `sample_recovered_tokens`) for no more rows than have proposed tokens."""

    @functools.wraps(recover)
    def recover_proposed(
        max_spec_len: int,
        num_draft_tokens: Sequence[int],
        cu_num_draft_tokens: torch.Tensor,
        draft_token_ids: torch.Tensor,
        draft_probs: torch.Tensor | None,
        target_probs: torch.Tensor,
        sampling_metadata: Any,
        *args: Any,
    ) -> torch.Tensor:
        rows = [row for row, num in enumerate(num_draft_tokens) if num]
        if not rows:
            return torch.empty_like(draft_token_ids)
        # Tokens are in the order of the rows, so those without any can be left out.
        generators = sampling_metadata.generators
        seeded = {at: generators[row] for at, row in enumerate(rows) if row in generators}
        return recover(
            max_spec_len,
            [num_draft_tokens[row] for row in rows],
            cu_num_draft_tokens[rows],
            draft_token_ids,
            draft_probs,
            target_probs,
            dataclasses.replace(sampling_metadata, generators=seeded),
            *args,
        )

    return recover_proposed


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
