"""Gets a snapshot of the KV blocks that an instance holds, from the instance or the kv-cache-index.

A process with its own index asks for a snapshot after it has missed changes (`feed.py`).
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import grpc

from pdmesh.core.kv.prefix.snapshot_order import IndexFirst
from pdmesh.core.kv.tier import Tier
from pdmesh.errors import Unavailable
from pdmesh.kv.index.feed import Snapshot
from pdmesh.net.grpc import rpc
from pdmesh.net.registry import RegistryView
from pdmesh.v1.common_pb2 import InstanceRecord
from pdmesh.v1.instance_service_pb2 import GetKvSnapshotRequest
from pdmesh.v1.instance_service_pb2_grpc import InstanceServiceStub
from pdmesh.v1.kv_index_service_pb2 import SnapshotRequest
from pdmesh.v1.kv_index_service_pb2_grpc import KvIndexServiceStub

_TIMEOUT_S: Final = 4.0


class _Channels:
    """Open channels to registered processes.

    Opening a channel also closes the channels to processes that have left the registry.
    """

    def __init__(self, view: RegistryView) -> None:
        self._view = view
        self._open: dict[tuple[str, str], grpc.aio.Channel] = {}

    async def to(self, record: InstanceRecord) -> grpc.aio.Channel:
        place = _place(record)
        if place not in self._open:
            present = {_place(record) for record in self._view.records.values()}
            for gone in [p for p in self._open if p not in present]:
                await self._open.pop(gone).close(None)
            self._open[place] = rpc.channel_to(record)
        return self._open[place]

    async def close(self) -> None:
        for channel in self._open.values():
            await channel.close(None)
        self._open.clear()


class InstanceSource:
    """Asks the instance itself."""

    def __init__(self, view: RegistryView) -> None:
        self._channels = _Channels(view)

    async def __call__(self, record: InstanceRecord) -> Snapshot:
        if not record.grpc_address:
            raise Unavailable(f"{record.instance_id} has no address")
        stub = InstanceServiceStub(await self._channels.to(record))
        return await _gather(stub.GetKvSnapshot(GetKvSnapshotRequest(), timeout=_TIMEOUT_S))

    async def close(self) -> None:
        await self._channels.close()


class IndexSource:
    """Asks the kv-cache-index or the instance, as `IndexFirst` decides.

    The instance is also asked if there is no index, if the index fails, or if the index's snapshot
    is of another incarnation.
    """

    def __init__(self, view: RegistryView) -> None:
        self._view = view
        self._channels = _Channels(view)
        self._instance = InstanceSource(view)
        self._turns = IndexFirst()

    async def __call__(self, record: InstanceRecord) -> Snapshot:
        index = self._index()
        if index is not None and self._turns.asks_index(record.instance_id, time.monotonic()):
            stub = KvIndexServiceStub(await self._channels.to(index))
            request = SnapshotRequest(instance_ids=[record.instance_id])
            try:
                snapshot = await _gather(stub.Snapshot(request, timeout=_TIMEOUT_S))
            except Unavailable:
                return await self._instance(record)
            if snapshot.incarnation == record.incarnation:
                return snapshot
        return await self._instance(record)

    async def close(self) -> None:
        await self._channels.close()
        await self._instance.close()

    def _index(self) -> InstanceRecord | None:
        found = [r for _, r in sorted(self._view.records.items()) if r.service == "kv-cache-index"]
        return found[0] if found and found[0].grpc_address else None


def _place(record: InstanceRecord) -> tuple[str, str]:
    return record.instance_id, record.grpc_address


async def _gather(parts: Any) -> Snapshot:
    """Join the streamed parts of a snapshot.

    `parts` is the call of either service. The messages of both have the fields incarnation,
    sequence, tier and block_hashes.
    """
    by_tier: dict[str, list[bytes]] = {Tier.ENGINE: [], Tier.HOST: []}
    incarnation = sequence = 0
    try:
        async for part in parts:
            incarnation, sequence = part.incarnation, part.sequence
            if (held := by_tier.get(part.tier or Tier.ENGINE)) is not None:
                held.extend(part.block_hashes)
    except grpc.aio.AioRpcError as exc:
        raise Unavailable(f"snapshot: {exc.code().name}") from exc
    except asyncio.CancelledError as exc:
        # The channel was closed during the call, for example because the instance has left. The
        # caller was not cancelled.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Unavailable("snapshot: the channel was closed") from exc
    return Snapshot(incarnation, sequence, tuple(by_tier[Tier.ENGINE]), tuple(by_tier[Tier.HOST]))
