"""The mesh's token on calls between processes.

Every channel sends the token, and every server checks it before anything else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from pdmesh.errors import WrongMeshToken
from pdmesh.net.grpc import rpc
from pdmesh.net.grpc.mesh_token import METADATA_KEY
from pdmesh.v1.instance_service_pb2 import DESCRIPTOR, GetKvSnapshotRequest, GetStatusRequest
from pdmesh.v1.instance_service_pb2_grpc import InstanceServiceStub
from tests.support.sites.counting_servicer import CountingServicer, ask_all_ways

TOKEN = "0123456789abcdef0123"
STATUS = "/pdmesh.v1.InstanceService/GetStatus"
WRONG = [
    (),
    ((METADATA_KEY, ""),),
    ((METADATA_KEY, TOKEN[:-1]),),
    ((METADATA_KEY, TOKEN + "0"),),
    ((METADATA_KEY, "of-another-mesh-0000"),),
    (("authorization", f"Bearer {TOKEN}"),),
    ((METADATA_KEY, "of-another-mesh-0000"), (METADATA_KEY, TOKEN)),
]


@pytest.fixture(autouse=True)
def the_process_has_its_own_token_again() -> Iterator[None]:
    before = rpc.mesh_token()
    yield
    rpc.use_mesh_token(before)


@asynccontextmanager
async def serving(
    token: str, *, is_public: bool = False
) -> AsyncIterator[tuple[str, CountingServicer]]:
    rpc.use_mesh_token(token)
    server, servicer = rpc.server(is_public=is_public), CountingServicer()
    rpc.add_service(server, DESCRIPTOR.services_by_name["InstanceService"], servicer)
    port = server.add_insecure_port("127.0.0.1:0")
    await rpc.start(server)
    try:
        yield f"127.0.0.1:{port}", servicer
    finally:
        await server.stop(None)


async def test_a_caller_with_the_token_is_served() -> None:
    async with serving(TOKEN) as (address, servicer), rpc.channel(address) as channel:
        assert await ask_all_ways(channel) == ("i-0", 7, 1)
        assert servicer.num_calls == 3


@pytest.mark.parametrize("metadata", WRONG)
async def test_a_call_without_the_token_reaches_no_handler(
    metadata: tuple[tuple[str, str], ...],
) -> None:
    async with serving(TOKEN) as (address, servicer), rpc.channel(address, "") as channel:
        stub: Any = InstanceServiceStub(channel)
        calls = (
            lambda: stub.GetStatus(GetStatusRequest(), metadata=metadata),
            lambda: stub.GetKvSnapshot(GetKvSnapshotRequest(), metadata=metadata).read(),
            lambda: stub.Session(metadata=metadata).read(),
        )
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call()
            assert type(rpc.from_rpc_error(refused.value)) is WrongMeshToken
        assert servicer.num_calls == 0


async def test_a_call_without_the_token_is_refused_before_its_message_for_any_method() -> None:
    """Otherwise a stranger could make the server read 64 MiB before the server refuses the call."""
    async with serving(TOKEN) as (address, _), rpc.channel(address, "") as channel:
        # the stubs of grpc-stubs would require serializers
        open_stream: Any = channel.stream_stream
        for method in (STATUS, "/nobody.Service/Method"):
            call = open_stream(method)()  # no message is sent on the stream
            assert await call.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_public_server_neither_requires_nor_rejects_the_token() -> None:
    async with serving(TOKEN, is_public=True) as (address, servicer):
        for shown in ("", TOKEN):
            async with rpc.channel(address, shown) as channel:
                assert await ask_all_ways(channel) == ("i-0", 7, 1)
        assert servicer.num_calls == 6


async def test_a_mesh_without_a_token_asks_for_none() -> None:
    async with serving("") as (address, _), rpc.channel(address) as channel:
        assert await ask_all_ways(channel) == ("i-0", 7, 1)


async def test_calls_between_processes_ignore_proxies_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A user behind a company proxy found this. The mesh was ready, and answered every request with
    503.
    """
    for variable in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")  # nothing listens on this port
    for variable in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(variable, raising=False)
    async with serving(TOKEN) as (address, _), rpc.channel(address) as channel:
        assert await ask_all_ways(channel) == ("i-0", 7, 1)
