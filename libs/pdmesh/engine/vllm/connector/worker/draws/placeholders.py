"""Keeps the length of an answer right while vLLM does not know the ids of its tokens yet (S141).

With asynchronous scheduling, vLLM's older model runner enters -1 for a token that it has drawn. It
enters the id one step later, but only if a request of the batch needs ids, for example for
penalties. When such a request joins the batch, vLLM 0.32 replaces all the -1 at the end of another
answer by one id. That answer becomes shorter, so `min_tokens` and the position of a seeded draw
would be wrong. This patch puts the lost -1 back. That is enough, because nothing reads the ids of
these tokens.
"""

from __future__ import annotations

import functools
from typing import Any, Final

_PLACEHOLDER: Final = -1


def keep_placeholders() -> None:
    """Patch the model runner of this process. Idempotent."""
    from vllm.v1.worker.gpu_input_batch import InputBatch

    update = InputBatch.update_async_output_token_ids
    if getattr(update, "keeps_placeholders", False):
        return

    @functools.wraps(update)
    def update_and_keep(batch: Any) -> None:
        answers = batch.sampling_metadata.output_token_ids
        lengths = list(map(len, answers))
        update(batch)
        for answer, length in zip(answers, lengths, strict=True):
            if (num_lost := length - len(answer)) > 0:
                answer[-1:-1] = [_PLACEHOLDER] * num_lost  # before the id that vLLM entered

    update_and_keep.keeps_placeholders = True  # type: ignore[attr-defined]
    InputBatch.update_async_output_token_ids = update_and_keep
