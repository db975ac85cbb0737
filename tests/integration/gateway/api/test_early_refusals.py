"""Sends requests that the gateway refuses after their head, while their bodies are still on the
way.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Final

import pytest

from pdmesh import api_keys
from pdmesh.api_keys import KeyFile
from pdmesh.services.gateway.access.access_control import KeyedAccess
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.support.waiting import until

HEAD: Final = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
CHUNKED: Final = b"transfer-encoding: chunked\r\n\r\n"
CHUNK: Final = b"10000\r\n" + b"x" * 65536 + b"\r\n"
MIB: Final = 1 << 20


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.num_sent = 0

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()
        self.num_sent += len(data)

    async def send_all(self, parts: Iterator[bytes]) -> None:
        with suppress(ConnectionError):
            for part in parts:
                await self.send(part)

    async def answer(self) -> tuple[int, bytes, Any]:
        """Read one answer and return its status, headers and parsed body. The connection stays
        open.
        """
        async with asyncio.timeout(60):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            body = await self.reader.readexactly(length)
        return int(head[9:12]), head.lower(), json.loads(body)

    async def is_ended(self) -> bool:
        with suppress(ConnectionError):
            async with asyncio.timeout(60):
                return await self.reader.read() == b""
        return True


@asynccontextmanager
async def connected(mesh: GatewayMesh) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", mesh.gateway.http.port)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


@asynccontextmanager
async def keyed_mesh(folder: Path, **settings: Any) -> AsyncIterator[tuple[GatewayMesh, bytes]]:
    """A mesh whose gateway needs an API key, and a header with a valid key."""
    file = KeyFile()
    key = api_keys.issue(file, "acme")
    api_keys.save(folder / "keys.json", file)
    async with gateway_mesh(folder, access=KeyedAccess(folder / "keys.json"), **settings) as mesh:
        yield mesh, f"authorization: Bearer {key}\r\n".encode()


@pytest.mark.parametrize("refused", [b"/v1/completions", b"/v1/nope", b"/health/live"])
async def test_a_refusal_waits_for_the_rest_of_its_request_and_keeps_the_connection(
    tmp_path: Path, refused: bytes
) -> None:
    """The gateway answers only after the whole request. Otherwise Envoy would reset an HTTP/2
    stream whose answer came before the end of its request.
    """
    body = json.dumps({"model": "tiny", "prompt": "abc", "max_tokens": 8}).encode()
    length = b"content-length: %d\r\n\r\n" % len(body)
    async with keyed_mesh(tmp_path) as (mesh, key), connected(mesh) as client:
        await client.send(HEAD.replace(b"/v1/completions", refused) + length + body[:5])
        await until(lambda: mesh.gateway.http_app.writing)
        for byte in body[5:-1]:  # send each byte in a packet of its own
            await client.send(bytes([byte]))
            await asyncio.sleep(0)
        assert mesh.gateway.http_app.writing, "it answered before the end of the request"
        await client.send(body[-1:])
        status, head, _ = await client.answer()
        assert status == {b"/v1/completions": 401, b"/v1/nope": 404}.get(refused, 405)
        assert b"connection: close" not in head
        await client.send(HEAD + key + length + body)
        status, _, told = await client.answer()
        assert status == 200
        assert told["choices"][0]["text"] == mesh.expected_text("abc", 8)


@pytest.mark.fault("F29", "F31")
async def test_a_client_that_stops_within_its_body_is_answered_and_closed(tmp_path: Path) -> None:
    async with keyed_mesh(tmp_path, receive_timeout_s=600.0) as (mesh, _):
        async with connected(mesh) as client:
            await client.send(HEAD + b"content-length: 100\r\n\r\nabc")
            status, head, _ = await client.answer()
            assert (status, b"connection: close" in head) == (401, True)
            assert await client.is_ended()
        await until(lambda: not mesh.gateway.http.num_connections)


@pytest.mark.fault("F29", "F31")
async def test_a_client_that_sends_without_end_is_answered_and_closed(tmp_path: Path) -> None:
    """The gateway drops the first MiB before its answer, and another MiB after it. Then it closes
    the connection.
    """
    async with keyed_mesh(tmp_path, receive_timeout_s=600.0) as (mesh, _):
        async with connected(mesh) as client:
            sending = asyncio.create_task(
                client.send_all(chain([HEAD + CHUNKED], repeat(CHUNK, 100_000)))
            )
            status, head, _ = await client.answer()
            assert (status, b"connection: close" in head) == (401, True)
            assert await client.is_ended()
            async with asyncio.timeout(60):
                await sending
            # `num_sent` can only have the two MiB that the gateway reads, and the kernel's buffers.
            assert client.num_sent < 16 * MIB
        await until(lambda: not mesh.gateway.http.num_connections)
        assert not mesh.gateway.http_app.body_room.num_bytes


async def test_an_announced_body_that_is_too_long_to_drop_is_refused_at_once(
    tmp_path: Path,
) -> None:
    async with keyed_mesh(tmp_path, receive_timeout_s=600.0) as (mesh, key):
        for given, expected in ((b"", 401), (key, 413)):
            async with connected(mesh) as client:
                await client.send(HEAD + given + b"content-length: 1000000000\r\n\r\n")
                status, head, _ = await client.answer()
                assert (status, b"connection: close" in head) == (expected, True)
                # The gateway must read these bytes. Otherwise the end of the connection could
                # destroy the answer.
                await client.send(b"x" * MIB)
                assert await client.is_ended()


@pytest.mark.parametrize("form", [b"100-continue", b"100-Continue"])
async def test_a_client_that_waits_for_100_continue_gets_its_refusal_instead(
    tmp_path: Path, form: bytes
) -> None:
    async with keyed_mesh(tmp_path, receive_timeout_s=600.0) as (mesh, key):
        expect = b"expect: " + form + b"\r\ncontent-length: 2\r\n\r\n"
        async with connected(mesh) as client:
            await client.send(HEAD + expect)
            status, head, _ = await client.answer()
            assert (status, b"connection: close" in head) == (401, True)
            assert await client.is_ended()
        async with connected(mesh) as client:
            await client.send(HEAD + key + expect)
            asked = await client.reader.readuntil(b"\r\n\r\n")
            assert asked == b"HTTP/1.1 100 Continue\r\n\r\n"
            await client.send(b"{}")
            status, head, _ = await client.answer()
            assert (status, b"connection: close" in head) == (400, False)
