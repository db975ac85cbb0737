"""Corrects `min_tokens` in vLLM 0.32 for the token that a step draws after its proposed tokens.

vLLM forbids the tokens that end an answer until `min_tokens` tokens are drawn. For the token after
the proposed ones, vLLM counts only the tokens that were drawn before the step. So without this
patch, vLLM would forbid the end of an answer that is long enough with the proposed tokens.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any


def count_proposed_tokens() -> None:
    """Patch the sampler of this process. Idempotent."""
    from vllm.v1.sample.sampler import Sampler

    shape = Sampler.apply_logits_processors
    if getattr(shape, "counts_proposed", False):
        return

    # Any, because vLLM's tensors and metadata are passed on unchanged.
    @functools.wraps(shape)
    def apply_logits_processors(
        sampler: Any, logits: Any, sampling_metadata: Any, predict_bonus_token: bool
    ) -> Any:
        proposed = sampling_metadata.spec_token_ids if predict_bonus_token else None
        with _long_enough(sampling_metadata, [len(tokens) for tokens in proposed or ()]):
            return shape(sampler, logits, sampling_metadata, predict_bonus_token)

    apply_logits_processors.counts_proposed = True  # type: ignore[attr-defined]
    Sampler.apply_logits_processors = apply_logits_processors


@contextlib.contextmanager
def _long_enough(sampling_metadata: Any, num_proposed: list[int]) -> Iterator[None]:
    """Within the `with` block, rows that reach `min_tokens` with their proposed tokens may end."""
    import torch
    from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor

    kept: list[tuple[Any, Any, Any]] = []
    for processor in sampling_metadata.logitsprocs.non_argmax_invariant:
        if not isinstance(processor, MinTokensLogitsProcessor):
            continue
        rows = [
            row
            for row, (least, drawn, *_) in processor.min_toks.items()
            if row < len(num_proposed) and len(drawn) + num_proposed[row] >= least
        ]
        if rows:
            masked, restored = processor.logits_slice, processor.restore_logits_slice
            kept.append((processor, masked, restored))
            free = torch.tensor(rows, device=masked[0].device)
            processor.logits_slice = _without(masked, free)
            processor.restore_logits_slice = _without(restored, free)
    try:
        yield
    finally:
        for processor, masked, restored in kept:
            processor.logits_slice, processor.restore_logits_slice = masked, restored


def _without(entries: tuple[Any, Any], rows: Any) -> tuple[Any, Any]:
    """(row, token) pairs without those of `rows`."""
    import torch

    stays = ~torch.isin(entries[0], rows)
    return entries[0][stays], entries[1][stays]
