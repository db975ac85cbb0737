"""The start of a gRPC server, which may be cancelled halfway, and the bound on connections."""

from __future__ import annotations

import asyncio

import pytest

from pdmesh.net.grpc import rpc
from tests.support.attack.raw_http2 import HELLO


@pytest.mark.req("S23")
async def test_a_server_whose_start_is_cancelled_does_not_listen() -> None:
    """The nemesis tests found this. A group changed while an instance loaded for it, and the
    instance's server could no longer be stopped.
    """
    server = rpc.server()
    port = server.add_insecure_port("127.0.0.1:0")
    starting = asyncio.create_task(rpc.start(server))
    await asyncio.sleep(0)  # the start has begun after this
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    with pytest.raises(OSError, match="Connect call failed"):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_server_that_is_started_listens() -> None:
    server = rpc.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await rpc.start(server)
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.close()
    await writer.wait_closed()
    await server.stop(None)


@pytest.mark.fault("F29")
async def test_incoming_and_outgoing_connections_share_one_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stranger without a token once opened 20,000 connections to a master. The connections used
    up the master's file descriptors, and the master lost its lease.
    """
    monkeypatch.setattr(rpc, "_MAX_CONNECTIONS", 3, raising=False)
    server = rpc.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await rpc.start(server)
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
    for _, writer in opened:
        writer.write(HELLO)
    answers = [asyncio.create_task(reader.read(1)) for reader, _ in opened]
    async with asyncio.timeout(30):
        await asyncio.wait(answers)
    given = sorted(a.result() if a.exception() is None else b"" for a in answers)
    assert [bool(each) for each in given] == [False, False, True, True, True]
    for _, writer in opened:
        writer.transport.abort()
    await server.stop(None)
