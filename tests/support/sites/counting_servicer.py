"""An InstanceService that answers and counts calls, and a client that makes calls of each kind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from pdmesh.v1.common_pb2 import InstanceRecord
from pdmesh.v1.instance_service_pb2 import (
    GetKvSnapshotRequest,
    GetKvSnapshotResponse,
    GetModelTextRequest,
    GetModelTextResponse,
    GetStatusRequest,
    GetStatusResponse,
    InspectAdapterRequest,
    InspectAdapterResponse,
    SessionRequest,
    SessionResponse,
)
from pdmesh.v1.instance_service_pb2_grpc import InstanceServiceStub


class CountingServicer:
    """Answers every call, and counts the calls that reached it."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def GetStatus(self, request: GetStatusRequest, context: object) -> GetStatusResponse:
        self.num_calls += 1
        return GetStatusResponse(record=InstanceRecord(instance_id="i-0"))

    async def GetKvSnapshot(
        self, request: GetKvSnapshotRequest, context: object
    ) -> AsyncIterator[GetKvSnapshotResponse]:
        self.num_calls += 1
        yield GetKvSnapshotResponse(sequence=7)

    async def GetModelText(
        self, request: GetModelTextRequest, context: object
    ) -> AsyncIterator[GetModelTextResponse]:
        self.num_calls += 1
        yield GetModelTextResponse(name="config.json")

    async def InspectAdapter(
        self, request: InspectAdapterRequest, context: object
    ) -> InspectAdapterResponse:
        self.num_calls += 1
        return InspectAdapterResponse(rank=4)

    async def Session(
        self, requests: AsyncIterator[SessionRequest], context: object
    ) -> AsyncIterator[SessionResponse]:
        self.num_calls += 1
        async for _ in requests:
            yield SessionResponse()


async def ask_all_ways(channel: grpc.aio.Channel) -> tuple[str, int, int]:
    stub: Any = InstanceServiceStub(channel)  # grpc-stubs cannot type calls for asyncio
    status = await stub.GetStatus(GetStatusRequest(), metadata=(("x-other", "1"),))
    sequences = [part.sequence async for part in stub.GetKvSnapshot(GetKvSnapshotRequest())]
    call = stub.Session()
    await call.write(SessionRequest())
    await call.read()
    await call.done_writing()
    return status.record.instance_id, sequences[0], 1
