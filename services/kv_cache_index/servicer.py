"""The gRPC service KvIndexService, which answers from the index in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

from pdmesh.core.kv.prefix.block_hash import HASH_BYTES
from pdmesh.core.kv.prefix.prefix_index import TIERS, PrefixIndex
from pdmesh.core.kv.tier import Tier
from pdmesh.errors import InvalidRequest
from pdmesh.v1.kv_index_service_pb2 import (
    MatchRequest,
    MatchResponse,
    PrefixMatch,
    SnapshotRequest,
    SnapshotResponse,
)

_PART: Final = 32_768  # the most hashes in a message (half a megabyte)
_MAX_HASHES: Final = 1_000_000

Context = grpc.aio.ServicerContext[Any, Any]


class KvIndexServicer:
    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    async def Match(self, request: MatchRequest, context: Context) -> MatchResponse:  # noqa: N802
        hashes = list(request.block_hashes)
        if len(hashes) > _MAX_HASHES or any(len(h) != HASH_BYTES for h in hashes):
            message = f"must have at most {_MAX_HASHES} hashes of {HASH_BYTES} bytes each"
            raise InvalidRequest(message, field="block_hashes")
        if request.tier not in ("", *TIERS):
            raise InvalidRequest(f"must be one of {', '.join(TIERS)}", field="tier")
        tier = Tier(request.tier or Tier.ENGINE)
        matches = [
            PrefixMatch(instance_id=i, incarnation=version[0], num_blocks=num_blocks)
            for i, num_blocks in sorted(self._index.match(hashes, tier).items())
            if (version := self._index.version(i))
        ]
        return MatchResponse(matches=matches)

    async def Snapshot(  # noqa: N802
        self, request: SnapshotRequest, context: Context
    ) -> AsyncIterator[SnapshotResponse]:
        """Send all blocks of the requested instances, or of all instances.

        An instance is left out while this index lacks changes of its blocks, or loads them anew.
        The caller must then ask the instance itself.
        """
        for instance_id in list(request.instance_ids) or self._index.instance_ids():
            version = self._index.version(instance_id)
            is_known = self._index.is_whole(instance_id)
            if version is None or not is_known or self._index.is_loading(instance_id):
                continue
            # The lists are copies, because the index may change between the parts.
            held = {tier: list(self._index.blocks(instance_id, tier)) for tier in TIERS}
            parts = [
                (tier, blocks[start : start + _PART])
                for tier, blocks in held.items()
                for start in range(0, len(blocks) or tier is Tier.ENGINE, _PART)
            ]
            for number, (tier, blocks) in enumerate(parts, start=1):
                yield SnapshotResponse(
                    instance_id=instance_id,
                    incarnation=version[0],
                    sequence=version[1],
                    block_hashes=blocks,
                    is_last=number == len(parts),
                    tier="" if tier is Tier.ENGINE else tier,
                )
