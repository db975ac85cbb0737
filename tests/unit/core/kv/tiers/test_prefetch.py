"""Tests how many blocks are prefetched before a prompt needs them."""

from __future__ import annotations

import pytest

from pdmesh.core.kv.tiers.load_plan import Cost
from pdmesh.core.kv.tiers.prefetch import MAX_PREFETCHING, most_prefetched

COST = Cost(latency_s=0.1, block_s=0.01)


@pytest.mark.parametrize(
    ("timeout_s", "num_slots", "num_loading", "most"),
    [
        (2.2, 10_000, 0, 100),  # half of the timeout minus the latency is 1 s
        (0.1, 10_000, 0, 0),  # not even the first block arrives in time
        (1000.0, 80, 0, 10),  # an eighth of the pool's slots
        (1000.0, 80, 4, 6),
        (1000.0, 80, 11, 0),  # loads for prompts use up the limit
        (1000.0, 1 << 20, 0, MAX_PREFETCHING),
    ],
)
def test_no_more_are_brought_than_arrive_in_time_and_leave_prompts_enough(
    timeout_s: float, num_slots: int, num_loading: int, most: int
) -> None:
    assert most_prefetched(COST, timeout_s, num_slots, num_loading) == most
