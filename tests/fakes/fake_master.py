"""A fake master, behind real gRPC. A test says whether it answers, refuses, or is silent.

A plan ranks the instances that may serve a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pdmesh.errors import Overloaded
from pdmesh.net.grpc import rpc
from pdmesh.v1 import scheduler_service_pb2 as pb
from pdmesh.v1.common_pb2 import InstanceRecord


class FakeMaster:
    """Gives no plans: the epoch in each answer is the number of queries in the request."""

    def __init__(self) -> None:
        self.num_streams = 0
        self.is_silent = False
        self.is_refusing = False
        # how many blocks of any prompt instances hold, by scenario
        self.held: dict[str, int] = {}
        self.matched: list[int] = []  # the number of hashes in each MatchPrefix request

    async def Plan(self, request: pb.PlanRequest, context: Any) -> pb.PlanResponse:
        return pb.PlanResponse(epoch=len(request.queries))

    async def PlanStream(
        self, requests: AsyncIterator[pb.PlanStreamRequest], context: Any
    ) -> AsyncIterator[pb.PlanStreamResponse]:
        self.num_streams += 1
        async for request in requests:
            while self.is_silent:
                await asyncio.sleep(0.01)
            if self.is_refusing:
                raise Overloaded("not now", retry_after_ms=1000)
            yield pb.PlanStreamResponse(response=await self.Plan(request.request, context))

    async def MatchPrefix(
        self, request: pb.MatchPrefixRequest, context: Any
    ) -> pb.MatchPrefixResponse:
        self.matched.append(len(request.block_hashes))
        if self.is_refusing:
            raise Overloaded("not now", retry_after_ms=1000)
        return pb.MatchPrefixResponse(num_blocks=self.held)

    async def ListGroups(self, request: Any, context: Any) -> Any:
        raise NotImplementedError


def leader_at(port: int) -> InstanceRecord:
    """The registry's record of the master at this port."""
    return InstanceRecord(
        instance_id="master-0",
        incarnation=1,
        service="master-scheduler",
        grpc_address=f"127.0.0.1:{port}",
        is_leader=True,
    )


@asynccontextmanager
async def serving(master: FakeMaster, port: int = 0) -> AsyncIterator[int]:
    server = rpc.server()
    rpc.add_service(server, pb.DESCRIPTOR.services_by_name["SchedulerService"], master)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)
