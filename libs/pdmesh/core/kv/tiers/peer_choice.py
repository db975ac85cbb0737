"""Decides from which peers' host pools an instance may take a prompt's blocks, longest run first.

The kv-cache-index names the peers, and may be out of date. A peer must be the incarnation that the
registry knows, in the region that the instance's KV stays in, and must not have sent corrupt KV.
`load_plan.py` decides whether fetching from it beats computing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pdmesh.core.kv.transfer.source_exclusions import KvSource

MAX_PEERS: Final = 4  # the longest runs


@dataclass(frozen=True, slots=True)
class PoolOwner:
    """An instance as its record describes it. `addresses`: of its KV agents, by rank."""

    source: KvSource
    kv_region: str
    addresses: Sequence[str]


@dataclass(frozen=True, slots=True)
class PoolMatch:
    """How many blocks of a chain a pool holds without a gap, as the index says."""

    source: KvSource
    num_blocks: int


def peers_to_ask(
    matches: Iterable[PoolMatch],
    known: Mapping[str, PoolOwner],
    me: str,
    kv_region: str,
    corrupt: Collection[KvSource],
) -> list[tuple[PoolOwner, int]]:
    """Each peer with the number of its blocks. `known`: by instance id; `me`: our own id."""
    found = [
        (owner, match.num_blocks)
        for match in sorted(matches, key=lambda match: -match.num_blocks)
        if (owner := known.get(match.source.instance_id)) is not None
        and owner.source == match.source
        and owner.kv_region == kv_region
        and owner.source not in corrupt
        and owner.source.instance_id != me
        and owner.addresses
    ]
    return found[:MAX_PEERS]
