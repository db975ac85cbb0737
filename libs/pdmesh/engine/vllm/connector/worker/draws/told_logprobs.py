"""Gives each request of a batch the log probabilities that it asked for.

vLLM's older model runner reports the likeliest tokens for all requests of a batch. But if one
request asks for tokens by their ids, the runner reports only these tokens. The other requests of
the batch would get no log probabilities. So this patch fills their rows with the likeliest tokens.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch

_MOST: Final = 20  # how many likely tokens a request may ask for, at most


def tell_each_its_own() -> None:
    """Patch the sampler of this process. Idempotent."""
    from vllm.v1.sample.sampler import Sampler

    gather = Sampler.gather_specific_token_logprobs
    if getattr(gather, "tells_each_its_own", False):
        return

    @functools.wraps(gather)
    def gather_all(sampler: Any, logprobs: Any, ids_by_row: Any, sampled: Any) -> Any:
        found = gather(sampler, logprobs, ids_by_row, sampled)
        return found if found is None else with_likeliest(found, logprobs, ids_by_row)

    gather_all.tells_each_its_own = True  # type: ignore[attr-defined]
    Sampler.gather_specific_token_logprobs = gather_all


def with_likeliest(found: Any, logprobs: torch.Tensor, ids_by_row: dict[int, list[int]]) -> Any:
    """Fill the rows whose requests did not ask for tokens by id.

    `found` is vLLM's own result. It has the drawn token in its first column.
    """
    num_rows, vocab_size = logprobs.shape
    others = [row for row in range(num_rows) if row not in ids_by_row]
    if not others:
        return found
    num_top = min(_MOST, vocab_size)
    ids, values = found.logprob_token_ids, found.logprobs
    if (missing := 1 + num_top - ids.shape[1]) > 0:
        ids = torch.nn.functional.pad(ids, (0, missing))
        values = torch.nn.functional.pad(values, (0, missing), value=float("-inf"))
    top = logprobs[others].topk(num_top, dim=-1)
    ids[others, 1 : num_top + 1] = top.indices.to(ids.dtype)
    values[others, 1 : num_top + 1] = top.values.to(values.dtype)
    return found._replace(logprob_token_ids=ids, logprobs=values)
