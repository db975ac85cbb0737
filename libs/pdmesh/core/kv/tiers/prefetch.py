"""Limits how many blocks an instance fetches from a peer before a prompt needs them (ADR 0041).

Within this limit, `load_plan.py` decides which blocks are fetched. For that, the time to compute a
block is multiplied by the chance that a prompt will need the blocks.
"""

from __future__ import annotations

from typing import Final

from pdmesh.core.kv.tiers.load_plan import Cost

MAX_PREFETCHING: Final = 256  # while so many blocks are being fetched, no more are prefetched
_POOL_SHARE: Final = 8  # prefetches may take an eighth of the pool's slots
_TIME_SHARE: Final = 2  # prefetches should end within half of the time limit


def most_prefetched(cost: Cost, timeout_s: float, num_slots: int, num_loading: int) -> int:
    """The largest number of further blocks to prefetch from a peer.

    At the peer's `cost`, these blocks should arrive within `timeout_s / _TIME_SHARE`. Prefetches
    may use a share of the `num_slots`, and at most MAX_PREFETCHING slots. The `num_loading` blocks
    that are being fetched count against both of these limits.
    """
    in_time = int((timeout_s / _TIME_SHARE - cost.latency_s) / cost.block_s)
    at_once = min(MAX_PREFETCHING, num_slots // _POOL_SHARE) - num_loading
    return max(0, min(in_time, at_once))
