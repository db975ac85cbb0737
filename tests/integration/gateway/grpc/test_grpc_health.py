"""Tests the gateway's health service, grpc.health.v1. Its callers need no key, so they must not be
able to disturb other clients.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdmesh.net.grpc import rpc
from pdmesh.services.gateway.grpc.health import HealthServicer
from tests.fakes.gateway_mesh import GatewayMesh
from tests.support.attack.raw_http2 import (
    DATA,
    HEADERS,
    HELLO,
    PING,
    SETTINGS,
    call,
    frame,
)
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(60)

WATCH = b"/grpc.health.v1.Health/Watch"
SERVICE = "pdmesh.v1.InferenceService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
NO_WINDOW = frame(SETTINGS, struct.pack(">HI", 4, 0))
STRANGER = "127.0.0.66"
ANSWER_S = 20.0


def watch(stream: int) -> bytes:
    return call(stream, WATCH) + frame(DATA, b"\0" * 5, flags=1, stream=stream)


@asynccontextmanager
async def stranger(port: int, sent: bytes) -> AsyncIterator[None]:
    """A caller without a key. It waits until the server's answer has begun, but its flow-control
    window leaves the server no room to write.

    The caller answers the server's pings, because otherwise the server would cut the connection.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(STRANGER, 0))
    writer.write(HELLO + NO_WINDOW + sent)
    is_answered = asyncio.Event()

    async def listen() -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readexactly(9)
                body = await reader.readexactly(int.from_bytes(head[:3], "big"))
                if head[3] == PING and not head[4]:
                    writer.write(frame(PING, body, flags=1))
                elif head[3] == HEADERS:
                    is_answered.set()

    listening = asyncio.create_task(listen())
    try:
        async with asyncio.timeout(ANSWER_S):
            await is_answered.wait()
        yield
    finally:
        writer.transport.abort()
        await listening


async def next_status(stream: Any) -> int:
    async with asyncio.timeout(ANSWER_S):
        return int((await stream.read()).status)


@pytest.mark.fault("F28", "F30")
async def test_a_watcher_that_reads_nothing_delays_no_change_and_no_stop(mesh: GatewayMesh) -> None:
    """The servicer of the grpcio package writes while it holds a lock. With that servicer, the
    gateway's health status once froze, and its stop never ended.
    """
    server = mesh.gateway.grpc
    async with (
        stranger(server.port, watch(1)),
        rpc.channel(f"127.0.0.1:{server.port}") as channel,
    ):
        honest: Any = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        async with asyncio.timeout(ANSWER_S):
            while await next_status(honest) != SERVING:
                pass
            server.set_serving(False)
            assert await next_status(honest) == NOT_SERVING
            await server.stop(0.1)
            assert await honest.read() is grpc.aio.EOF  # type: ignore[attr-defined]  # missing in grpc-stubs


class Caller:
    """The part of a gRPC context that `Watch` needs."""

    def __init__(self, address: str) -> None:
        self._address = address

    def peer(self) -> str:
        return f"ipv4:{self._address}:4711"


@pytest.mark.fault("F29", "F30")
async def test_watches_are_bounded_and_the_address_with_most_makes_room() -> None:
    servicer = HealthServicer((SERVICE,), max_watches=4)
    told: dict[str, list[int]] = {}

    async def watching(name: str, address: str) -> None:
        asked = health_pb2.HealthCheckRequest(service=SERVICE)
        async for answer in servicer.Watch(asked, Caller(address)):
            told.setdefault(name, []).append(answer.status)

    honest = asyncio.create_task(watching("honest", "127.0.0.1"))
    await until(lambda: "honest" in told)
    many = [asyncio.create_task(watching(f"{i}", STRANGER)) for i in range(20)]
    await until(lambda: all(task.done() for task in many[:-3]))
    assert servicer.num_watches == 4
    servicer.set_serving(True)
    await until(lambda: told["honest"] == [NOT_SERVING, SERVING])
    servicer.close()
    await asyncio.gather(honest, *many, return_exceptions=True)
    assert told["honest"][-1] == told["19"][-1] == NOT_SERVING
    assert servicer.num_watches == 0


async def test_only_existing_services_are_known() -> None:
    servicer, server = HealthServicer((SERVICE,)), rpc.server()
    rpc.add_service(server, health_pb2.DESCRIPTOR.services_by_name["Health"], servicer)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="a.B"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        found = (await stub.List(health_pb2.HealthListRequest())).statuses
        assert {name: each.status for name, each in found.items()} == dict.fromkeys(
            ("", SERVICE), NOT_SERVING
        )
        unknown: Any = stub.Watch(health_pb2.HealthCheckRequest(service="a.B"))
        assert await next_status(unknown) == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        unknown.cancel()
        long: Any = stub.Watch(health_pb2.HealthCheckRequest(service="a" * 257))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await long.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await server.stop(None)
