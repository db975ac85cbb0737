"""Divides the inputs of a pooling call into batches.

A batch is large enough to fill a step of an engine, and small enough to run again soon on another
instance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

MAX_BATCH_INPUTS: Final = 32
MAX_BATCH_TOKENS: Final = 16_384  # a single longer input is a batch of its own
MAX_CALL_TOKENS: Final = 1 << 21  # of one call: 8 MiB of token ids


def batches(lengths: Sequence[int]) -> Iterator[range]:
    """The batches, as ranges of inputs. `lengths` has the number of tokens of each input."""
    start = num_tokens = 0
    for place, length in enumerate(lengths):
        is_full = place - start >= MAX_BATCH_INPUTS or num_tokens + length > MAX_BATCH_TOKENS
        if place > start and is_full:
            yield range(start, place)
            start, num_tokens = place, 0
        num_tokens += length
    if start < len(lengths):
        yield range(start, len(lengths))
