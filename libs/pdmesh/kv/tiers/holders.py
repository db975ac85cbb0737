"""Which peers' host pools hold a prompt's blocks, as the kv-cache-index knows it: a hint, in bounded time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import grpc
import structlog

from pdmesh.kv.tiers.peers import PeerHolding
from pdmesh.net import rpc
from pdmesh.net.registry import RegistryView
from pdmesh.v1.kv_index_service_pb2 import MatchRequest
from pdmesh.v1.kv_index_service_pb2_grpc import KvIndexServiceStub

log = structlog.get_logger(__name__)

_ASK_S: Final = 0.05
_PAUSE_S: Final = 1.0  # after a failure the index is left alone
MAX_HOLDINGS: Final = 4  # the longest ones


class HolderDirectory:
    """`connect` gives it a view of the registry; until then nobody holds anything."""

    def __init__(self, instance_id: str) -> None:
        self._instance_id = instance_id
        self._view: RegistryView | None = None
        self._channel: grpc.aio.Channel | None = None
        self._address = ""
        self._not_before = 0.0

    def connect(self, view: RegistryView) -> None:
        self._view = view

    async def find(self, names: Sequence[bytes], first: int) -> Sequence[PeerHolding]:
        """A `FindHolders`: never raises."""
        channel = await self._index()
        if channel is None or self._view is None or time.monotonic() < self._not_before:
            return ()
        request = MatchRequest(block_hashes=names[first:], tier="host")
        try:
            response = await KvIndexServiceStub(channel).Match(request, timeout=_ASK_S)
        except grpc.aio.AioRpcError as error:
            log.debug("kv.tier.index_failed", code=error.code().name)
            self._not_before = time.monotonic() + _PAUSE_S
            return ()
        holdings: list[PeerHolding] = []
        for match in sorted(response.matches, key=lambda m: -m.num_blocks):
            record = self._view.records.get(match.instance_id)
            if record is None or record.incarnation != match.incarnation:
                continue
            if match.instance_id != self._instance_id and record.kv_addresses:
                addresses = tuple(record.kv_addresses)
                holdings.append(
                    PeerHolding(
                        match.instance_id, match.incarnation, addresses, first, match.num_blocks
                    )
                )
        return holdings[:MAX_HOLDINGS]

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close(None)

    async def _index(self) -> grpc.aio.Channel | None:
        records = self._view.records.items() if self._view is not None else ()
        found = [r.grpc_address for _, r in sorted(records) if r.service == "kv-cache-index"]
        if not found:
            return None
        if found[0] != self._address:
            await self.close()
            self._address, self._channel = found[0], rpc.channel(found[0])
        return self._channel
