"""Reads how many tokens of an answer other engines have drawn, from vLLM's sampling parameters."""

from __future__ import annotations

from typing import Any, Final

NUM_DRAWN: Final = "pdmesh_num_drawn"


def num_drawn_before(params: Any) -> int:
    """How many tokens of the answer other engines have drawn.

    `params` is vLLM's SamplingParams, or None for a request that draws nothing.
    """
    extra = params.extra_args if params is not None else None
    return extra.get(NUM_DRAWN, 0) if extra else 0
