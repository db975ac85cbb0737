"""Asks the kv-cache-index which peers' host pools hold a prompt's blocks.

The answer is a hint and may be out of date. `core.kv.tiers.peer_choice` decides which of these
peers may be asked for blocks. An instance only reads the registry at intervals. If every instance
watched all others, the cost would grow with the square of the number of instances. A peer that
registers after the last reading is not asked yet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Final

import grpc
import structlog

from pdmesh.core.kv.tiers.peer_choice import PoolMatch, PoolOwner, peers_to_ask
from pdmesh.core.kv.transfer.source_exclusions import KvSource, SourceFault
from pdmesh.kv.tiers.peers import PeerHolding
from pdmesh.net.convert.source_exclusions import excluded_from
from pdmesh.net.grpc import rpc
from pdmesh.net.registry import Registry
from pdmesh.v1.common_pb2 import InstanceRecord
from pdmesh.v1.kv_index_service_pb2 import MatchRequest
from pdmesh.v1.kv_index_service_pb2_grpc import KvIndexServiceStub

log = structlog.get_logger(__name__)

_ASK_S: Final = 0.05
_READ_EVERY_S: Final = 10.0
_PAUSE_S: Final = 1.0  # the index is not asked for this time after a failure


class PeerLookup:
    """Finds holders of blocks. It finds none before `run` has read the registry."""

    def __init__(self, instance_id: str) -> None:
        self._instance_id = instance_id
        self._records: Mapping[str, InstanceRecord] = {}
        self._kv_region = ""  # where our KV must stay, by our record in the registry
        self._corrupt: set[KvSource] = set()  # peers that our record excludes for corrupt KV
        self._channel: grpc.aio.Channel | None = None
        self._place = ("", "")
        self._not_before = 0.0

    async def run(self, registry: Registry) -> None:
        while True:
            await self.read(registry)
            await asyncio.sleep(_READ_EVERY_S)

    async def read(self, registry: Registry) -> None:
        view = await registry.watch()
        self._records = dict(view.records)
        own = self._records.get(self._instance_id)
        self._kv_region = own.kv_region if own is not None else ""
        held = excluded_from(own) if own is not None else ()
        self._corrupt = {h.source for h in held if h.fault is SourceFault.CORRUPT}
        await view.close()

    async def find(self, names: Sequence[bytes], first: int) -> Sequence[PeerHolding]:
        """The peers that hold blocks from position `first` on (a `FindHolders`). Never raises."""
        channel = await self._index()
        if channel is None or time.monotonic() < self._not_before:
            return ()
        request = MatchRequest(block_hashes=names[first:], tier="host")
        try:
            response = await KvIndexServiceStub(channel).Match(request, timeout=_ASK_S)
        except grpc.aio.AioRpcError as error:
            log.debug("kv.tier.index_failed", code=error.code().name)
            self._not_before = time.monotonic() + _PAUSE_S
            return ()
        matches = [
            PoolMatch(KvSource(m.instance_id, m.incarnation), m.num_blocks)
            for m in response.matches
        ]
        ids = [match.instance_id for match in response.matches]
        owners = {i: _owner(self._records[i]) for i in ids if i in self._records}
        found = peers_to_ask(matches, owners, self._instance_id, self._kv_region, self._corrupt)
        return [
            PeerHolding(o.source.instance_id, o.source.incarnation, tuple(o.addresses), first, num)
            for o, num in found
        ]

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close(None)

    async def _index(self) -> grpc.aio.Channel | None:
        records = sorted(self._records.items())
        found = [r for _, r in records if r.service == "kv-cache-index"]
        if not found:
            return None
        place = found[0].instance_id, found[0].grpc_address
        if place != self._place:
            old = self._channel
            self._place, self._channel = place, rpc.channel_to(found[0])
            if old is not None:
                await old.close(_ASK_S)  # pending calls have this time to end
        return self._channel


def _owner(record: InstanceRecord) -> PoolOwner:
    source = KvSource(record.instance_id, record.incarnation)
    return PoolOwner(source, record.kv_region, tuple(record.kv_addresses))
