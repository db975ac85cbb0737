"""Finds out what a port gives to a caller without credentials, in each protocol of the mesh."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import grpc
from google.protobuf.descriptor import FileDescriptor

from pdmesh.v1 import (
    admin_service_pb2,
    inference_service_pb2,
    instance_service_pb2,
    kv_index_service_pb2,
    scheduler_service_pb2,
)

_SILENCE_S: Final = 3.0  # how long a silent port is waited for
_CALL_S: Final = 10.0
_MAX_ANSWER: Final = 1 << 20
_MODULES: Final = (
    admin_service_pb2,
    inference_service_pb2,
    instance_service_pb2,
    kv_index_service_pb2,
    scheduler_service_pb2,
)
_HEALTH: Final = tuple(f"/grpc.health.v1.Health/{name}" for name in ("Check", "List", "Watch"))
_REFLECTION: Final = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
_REFUSALS: Final = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,  # the port serves no such method
        grpc.StatusCode.UNAVAILABLE,  # the port has another protocol, or requires a certificate
        grpc.StatusCode.DEADLINE_EXCEEDED,  # the port does not answer
    }
)
# Paths to try on an operators' port, one of each kind. The paths of a gateway are in
# `/openapi.json`.
_OPS_PATHS: Final = (
    "/",
    "/page/page.css",
    "/page/modules/main.js",
    "/page/../page_routes.py",
    "/metrics",
    "/health/live",
    "/health/ready",
    "/status/none",
)
_PAGE: Final = "/status/none"
_ADMIN: Final = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"]
NATS: Final = b'CONNECT {"verbose":false,"protocol":1}\r\nPING\r\n'
REDIS: Final = b"PING\r\n"


async def gifts(host: str, port: int, http_paths: list[tuple[str, str]]) -> set[str]:
    """What the port gives to a stranger; empty if it gives nothing.

    An item is `GET /metrics`, `gRPC /package.Service/Method`, `NATS` or `Redis`, for example. Items
    that came over TLS begin with `TLS`.
    """
    found: set[str] = set()
    for is_tls in (False, True):
        prefix = "TLS " if is_tls else ""
        async for gift in _raw(host, port, is_tls):
            found.add(prefix + gift)
        async for gift in _http(host, port, is_tls, http_paths):
            found.add(prefix + gift)
    return found | {gift async for gift in _grpc(f"{host}:{port}")}


def ops_paths() -> list[tuple[str, str]]:
    """The requests to try on an operators' port: `_OPS_PATHS` and every method of AdminService."""
    posts = (("POST", f"/admin/{method.name}") for method in _ADMIN.methods)
    return [*(("GET", path) for path in _OPS_PATHS), *posts]


def methods() -> Iterator[str]:
    """Every method of every service of the mesh."""
    for module in _MODULES:
        descriptor: FileDescriptor = module.DESCRIPTOR
        for service in descriptor.services_by_name.values():
            yield from (f"/{service.full_name}/{method.name}" for method in service.methods)


async def _raw(host: str, port: int, is_tls: bool) -> AsyncIterator[str]:
    """Yield the bytes that the port sends unasked, and NATS or Redis if it speaks that protocol."""
    if (greeting := await _answer(host, port, b"", is_tls)) and not _is_http2(greeting):
        yield f"says {greeting[:40]!r}"
    if b"PONG" in await _answer(host, port, NATS, is_tls):
        yield "NATS"
    if (await _answer(host, port, REDIS, is_tls)).startswith((b"+PONG", b"-NOAUTH", b"-NOPERM")):
        yield "Redis"


async def _http(
    host: str, port: int, is_tls: bool, paths: list[tuple[str, str]]
) -> AsyncIterator[str]:
    if not (await _answer(host, port, _request("GET", "/"), is_tls)).startswith(b"HTTP/"):
        return
    for method, path in paths:
        answer = await _answer(host, port, _request(method, path), is_tls, _CALL_S)
        if path == _PAGE and b'"pages":' in answer:
            yield "GET /status"  # the answer has the list of pages
        elif answer and _status(answer) not in {401, 403, 404, 405, 421}:
            yield f"{method} {path}"


def _request(method: str, path: str) -> bytes:
    body = b"{}" if method == "POST" else b""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def _is_http2(greeting: bytes) -> bool:
    """Whether these are the SETTINGS frame with which every HTTP/2 server begins."""
    return len(greeting) > 8 and greeting[3] == 4 and greeting[5:9] == b"\x00\x00\x00\x00"


async def _answer(
    host: str, port: int, question: bytes, is_tls: bool, within_s: float = _SILENCE_S
) -> bytes:
    """The bytes received until the connection ends or `within_s` is over. Empty if the port refuses
    the connection or sends nothing.
    """
    context = None
    if is_tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    received = bytearray()
    writer = None
    with contextlib.suppress(OSError, TimeoutError):  # ssl.SSLError is an OSError
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
            writer.write(question)
            while len(received) < _MAX_ANSWER and (data := await reader.read(65536)):
                received += data
    if writer is not None:
        writer.transport.abort()
    return bytes(received)


async def _grpc(address: str) -> AsyncIterator[str]:
    async with grpc.aio.insecure_channel(address) as channel:
        first = await _code(channel, _HEALTH[0])
        if first in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
            return  # the port does not speak gRPC with us
        for method in (*_HEALTH, _REFLECTION, *methods()):
            if await _code(channel, method) not in _REFUSALS:
                yield f"gRPC {method}"


async def _code(channel: Any, method: str) -> grpc.StatusCode:
    """The status with which a call ends. It is OK as soon as the server answers.

    The call sends an empty request only if the server waits for one. A server that refuses the call
    does not read the request, and gRPC may then report the lost request instead of the refusal.
    """
    code = await _ending(channel.stream_stream(method)(timeout=_SILENCE_S))
    if code is not grpc.StatusCode.DEADLINE_EXCEEDED:
        return code
    call = channel.stream_stream(method)(timeout=_CALL_S)
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
        await call.write(b"")
        await call.done_writing()
    return await _ending(call)


async def _ending(call: Any) -> grpc.StatusCode:
    try:
        if await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]  # lacks it
            return grpc.StatusCode.OK
        code: grpc.StatusCode = await call.code()
    except grpc.aio.AioRpcError as exc:
        return exc.code()
    finally:
        call.cancel()
    return code
