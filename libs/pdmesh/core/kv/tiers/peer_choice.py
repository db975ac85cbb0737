"""Decides from which peers' host pools an instance may fetch a prompt's blocks.

A host pool has KV blocks in host memory. The kv-cache-index names the peers, and may be out of
date. So a peer is asked only if the index names the incarnation (one life of an instance) that the
peer has in the registry. The peer must be in the region to which the instance's KV is confined, and
must not have sent corrupt KV. `load_plan.py` decides whether fetching is faster than computing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pdmesh.core.kv.transfer.source_exclusions import KvSource

MAX_PEERS: Final = 4  # the peers with the longest runs of blocks


@dataclass(frozen=True, slots=True)
class PoolOwner:
    """An instance as its record describes it. `addresses` are those of its KV agents."""

    source: KvSource
    kv_region: str
    addresses: Sequence[str]


@dataclass(frozen=True, slots=True)
class PoolMatch:
    """According to the index, a pool holds the first `num_blocks` blocks of a prompt."""

    source: KvSource
    num_blocks: int


def peers_to_ask(
    matches: Iterable[PoolMatch],
    known: Mapping[str, PoolOwner],
    me: str,
    kv_region: str,
    corrupt: Collection[KvSource],
) -> list[tuple[PoolOwner, int]]:
    """The peers to ask, each with the number of blocks that it holds, most first.

    `known` has the instances of the registry by id. `me` is our own instance id.
    """
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
