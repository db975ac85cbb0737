"""Decides how many blocks of a peer are brought here before a prompt needs them (ADR 0041).

`load_plan.py` decides which of these blocks are worth it, by how likely a prompt needs them.
"""

from __future__ import annotations

from typing import Final

from pdmesh.core.kv.tiers.load_plan import Cost

MAX_PREFETCHING: Final = 256  # blocks under way at once beyond which nothing is prefetched
_POOL_SHARE: Final = 8  # the pool's slots that prefetches may take: one of so many
_TIME_SHARE: Final = 2  # they are expected within this part of the time limit: one half


def most_prefetched(cost: Cost, timeout_s: float, num_slots: int, num_loading: int) -> int:
    """As many as arrive in time at the peers' `cost`, and as leave prompts enough of the pool's
    `num_slots` and of the `num_loading` blocks under way.
    """
    in_time = int((timeout_s / _TIME_SHARE - cost.latency_s) / cost.block_s)
    at_once = min(MAX_PREFETCHING, num_slots // _POOL_SHARE) - num_loading
    return max(0, min(in_time, at_once))
