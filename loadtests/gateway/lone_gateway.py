"""A gateway by itself, with scripted instances and a scripted master around it.

`instructions` runs this file twice with the code of a tree. As the mesh, the program prints the
records of its instances. As the gateway, it gets these records as arguments and prints its address.
There is no NATS, so a gateway without requests does hardly anything. All code between the gateway's
HTTP port and its sessions is the product's own.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import uvloop
from opentelemetry.sdk.resources import Resource

from pdmesh.service_process import calm_the_collector
from pdmesh.telemetry import logs, metrics, traces
from pdmesh.v1 import scheduler_service_pb2 as pb
from pdmesh.v1.common_pb2 import ROLE_DECODE, ROLE_PREFILL, InstanceRecord
from pdmesh.v1.scheduler_service_pb2_grpc import (
    SchedulerServiceServicer,
    add_SchedulerServiceServicer_to_server,
)
from tests.fakes.fake_instance import FakeInstance
from tests.fakes.gateway_mesh import gateway_mesh

# Time of a decode's step. A gateway that is 100 times slower still handles each token in time.
_STEP_S: Final = 0.02
_PATIENCE_S: Final = 300.0  # long, because Valgrind translates the code during the first request


class Master(SchedulerServiceServicer):
    """A master whose plans all name the same prefill and decode."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._result = pb.PlanResult(
            prefills=[pb.Candidate(instance_id=prefill, incarnation=1)],
            decodes=[pb.Candidate(instance_id=decode, incarnation=1)],
            group_id="default",
        )

    async def PlanStream(  # noqa: N802  # gRPC's name
        self, requests: AsyncIterator[pb.PlanStreamRequest], context: Any
    ) -> AsyncIterator[pb.PlanStreamResponse]:
        async for asked in requests:
            results = [self._result] * len(asked.request.queries)
            yield pb.PlanStreamResponse(response=pb.PlanResponse(epoch=1, results=results))

    async def Plan(self, request: pb.PlanRequest, context: Any) -> pb.PlanResponse:  # noqa: N802
        raise NotImplementedError

    async def MatchPrefix(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def ListGroups(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError


async def be_mesh() -> None:
    prefill = FakeInstance(ROLE_PREFILL, "prefill-0")
    decode = FakeInstance(ROLE_DECODE, "decode-0", step_s=_STEP_S, peers=[prefill])
    server = grpc.aio.server()
    add_SchedulerServiceServicer_to_server(Master("prefill-0", "decode-0"), server)
    master = InstanceRecord(
        instance_id="master-0",
        incarnation=1,
        service="master-scheduler",
        grpc_address=f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}",
        is_leader=True,
    )
    await server.start()
    records = [await prefill.start(), await decode.start(), master]
    print(*(record.SerializeToString().hex() for record in records), flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def be_gateway(records: Sequence[str]) -> None:
    resource = Resource.create({})
    metrics.configure(resource, "")
    traces.configure(resource, "")
    with tempfile.TemporaryDirectory(prefix="pdmesh-lone-") as directory:
        async with gateway_mesh(
            Path(directory), 0, 0, answer_s=_PATIENCE_S, ttft_s=_PATIENCE_S
        ) as mesh:
            for record in records:
                mesh.register(InstanceRecord.FromString(bytes.fromhex(record)))
            calm_the_collector()
            print(mesh.url, flush=True)
            await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    logs.configure("gateway", "gateway-0", "json", "info")
    _, role, *records = sys.argv
    uvloop.run(be_gateway(records) if role == "gateway" else be_mesh())


if __name__ == "__main__":
    main()
