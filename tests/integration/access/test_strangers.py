"""Asks every port of a mesh with TLS without credentials, in every protocol that the mesh speaks.

A stranger must get exactly what docs/security.md lists. The list gives a reason for each entry.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Final

import grpc
import httpx

from pdmesh import api_keys
from pdmesh.launcher.mesh import Mesh
from tests.integration.process.test_ports import LOCAL, ROOT, Found, check_ports, mesh_spec
from tests.support.attack.stranger import NATS, REDIS, gifts, ops_paths

HEADING: Final = "### What a stranger gets"
# The service, the kind of its port, and what a stranger gets from the port.
Gift = tuple[str, str, str]


def listed() -> set[Gift]:
    """The rows of the table in docs/security.md."""
    section = (ROOT / "docs/security.md").read_text().partition(HEADING)[2].partition("\n##")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)
    found = set()
    for services, kind, gift, reason in rows[2:]:
        assert reason.strip("- "), f"{gift} has no reason"
        for service in services.split(", "):
            found |= {(service, kind, name) for name in re.findall("`([^`]+)`", gift)}
    return found


async def test_a_stranger_gets_what_is_listed_as_public_and_nothing_else(tmp_path: Path) -> None:
    keys = api_keys.KeyFile()
    api_keys.issue(keys, "acme")
    api_keys.save(tmp_path / "keys.json", keys)
    spec = mesh_spec(
        tmp_path,
        tls=True,
        keys_file=tmp_path / "keys.json",
        env={"PDMESH_ADMIN_TOKEN": "the-operators-own-token"},
    )
    async with Mesh(spec, tmp_path / "mesh") as mesh:
        found = await check_ports(mesh)
        client_paths = await described_paths(mesh)
        given = await asyncio.gather(*(gifts_of(each, client_paths) for each in found))
    seen = {
        (each.port.service, each.port.kind, gift)
        for each, gifts_here in zip(found, given, strict=True)
        for gift in gifts_here
    }
    assert sorted(seen - listed()) == []
    assert sorted(listed() - seen) == []


async def test_a_stranger_notices_each_kind_of_open_port() -> None:
    answers = {
        NATS: b"PONG\r\n", REDIS: b"-NOAUTH Authentication required.\r\n",
        b"GET /metrics": b"HTTP/1.1 200 OK\r\n\r\n",
    }  # fmt: skip

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        question = await reader.read(4096)
        known = (answer for start, answer in answers.items() if question.startswith(start))
        writer.write(next(known, b"HTTP/1.1 404 Not Found\r\n\r\n"))
        writer.close()

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0")
        writer.close()

    async with await asyncio.start_server(speak, LOCAL) as server:
        port = server.sockets[0].getsockname()[1]
        assert await gifts(LOCAL, port, ops_paths()) == {"NATS", "Redis", "GET /metrics"}
    async with await asyncio.start_server(greet, LOCAL) as server:
        port = server.sockets[0].getsockname()[1]
        assert await gifts(LOCAL, port, ops_paths()) == {"says b'SSH-2.0'"}


async def test_a_stranger_notices_a_method_that_asks_for_nothing() -> None:
    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(answer_empty)
    name = "pdmesh.v1.AdminService"
    handler = grpc.method_handlers_generic_handler(name, {"GetDesired": method})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port(f"{LOCAL}:0")
    await server.start()
    try:
        assert await gifts(LOCAL, port, ops_paths()) == {f"gRPC /{name}/GetDesired"}
    finally:
        await server.stop(0)


async def answer_empty(_: bytes, __: object) -> bytes:
    return b""


async def described_paths(mesh: Mesh) -> list[tuple[str, str]]:
    """Every request that the gateway describes in its OpenAPI document."""
    async with httpx.AsyncClient(timeout=30) as client:
        document = (await client.get(f"{mesh.http_url}/openapi.json")).json()
    paths = [
        (method.upper(), re.sub(r"\{[^}]+\}", "default", path))
        for path, operations in document["paths"].items()
        for method in operations
    ]
    assert len(paths) > 10
    return paths


async def gifts_of(found: Found, client_paths: list[tuple[str, str]]) -> set[str]:
    paths = sorted({*client_paths, *ops_paths()})
    return await gifts(LOCAL, found.number, paths)
