"""Mends how vLLM 0.32 samples on a CPU with speculation and a temperature above 0.

For each proposed token, vLLM needs the temperature, `top_k` and `top_p` of the token's request. The
CPU kernel writes these values to a copy that is never read, unless they are 64-bit integers. So the
result stays unwritten: without this module, logits are divided by the bytes that the result's
memory held before, and `top_k` crashes the engine.

vLLM also does the work of checking tokens where none are proposed, which slows a batch of 32 by a
fifth. With this module, a step without proposals samples as if speculation were off.
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

    # Any, because functions of vLLM's module are replaced.
    sampler: Any = rejection_sampler
    if sampler.expand_batch_to_tokens is expanded:
        return
    sampler.expand_batch_to_tokens = expanded
    sampler.sample_recovered_tokens = only_where_proposed(sampler.sample_recovered_tokens)
    check = sampler.RejectionSampler.forward
    sampler.RejectionSampler.forward = only_if_proposed(check)


def only_if_proposed(check: Callable[..., Any]) -> Callable[..., Any]:
    """Calls `check` only in steps with proposed tokens. Other steps only draw.

    `check` is vLLM's `RejectionSampler.forward`, which copies the logits.
    """

    @functools.wraps(check)
    def draw(sampler: Any, metadata: Any, draft_probs: Any, logits: Any, asked: Any) -> Any:
        if metadata.max_spec_len:
            return check(sampler, metadata, draft_probs, logits, asked)
        # The logits are one row for each request, as without speculation.
        return sampler.sampler(logits=logits, sampling_metadata=asked, predict_bonus_token=True)

    return draw


def only_where_proposed(recover: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Calls `recover` for only the rows with proposed tokens.

    `recover` is vLLM's `sample_recovered_tokens`. For each row, it makes as many random numbers as
    the vocabulary has tokens, to replace a proposed token that is refused.
    """

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
        # Tokens are in the order of the rows, so rows without tokens can be left out.
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
    """Repeats each request's value for each of its tokens.

    `cu_num_tokens` has the running sum of the requests' numbers of tokens.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = x.masked_fill(x == replace_from, replace_to)
    return values.repeat_interleave(counts, output_size=num_tokens)
