"""Tests the load generator and the worker that are written in C. They must count exactly what was
sent, however TCP divides the bytes.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from loadtests.peers.cases import EIGHT, ONE, PATH, STREAMS, Case, Load
from loadtests.peers.install import compiled
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")

EVENT = b'data: {"choices":[]}\n\n'


async def generate(
    port: int, folder: Path, case: Case, connections: int = 4, seconds: float = 0.3
) -> Load:
    bodies = folder / "bodies"
    bodies.write_text(case.body + "\n")
    command = [compiled("generator", folder), port, PATH, bodies, connections, seconds]
    process = await asyncio.create_subprocess_exec(
        *map(str, command), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return Load(**json.loads(out))


@asynccontextmanager
async def worker(folder: Path, role: str = "regular") -> AsyncIterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(compiled("worker", folder), str(port), role)
    try:
        async with httpx.AsyncClient(trust_env=False) as client:

            async def is_up() -> bool:
                try:
                    return (await client.get(f"http://127.0.0.1:{port}/health")).is_success
                except httpx.HTTPError:
                    return False

            await until(is_up)
        yield port
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def serving(pieces: Callable[[], list[bytes]]) -> AsyncIterator[tuple[int, list[int]]]:
    """A server that writes the pieces of an answer one by one. Yields its port, and a list whose
    only item is the number of its answers.
    """
    num_answers = [0]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0]))
                num_answers[0] += 1
                for piece in pieces():
                    if not piece:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the generator has closed its connection
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], num_answers


@pytest.mark.parametrize("case", [ONE, EIGHT, STREAMS], ids=lambda case: case.name)
async def test_generator_and_worker_agree(tmp_path: Path, case: Case) -> None:
    async with worker(tmp_path) as port:
        load = await generate(port, tmp_path, case)
    assert load.num_ok > 0
    assert load.num_failed == 0
    assert load.num_events == (load.num_ok * case.max_tokens if case.is_stream else 0)
    assert 0 < load.latency_p50_ms <= load.latency_p99_ms
    assert (load.ttft_p50_ms > 0) == case.is_stream


async def test_a_prefill_answers_with_one_token(tmp_path: Path) -> None:
    async with worker(tmp_path, "prefill") as port:
        load = await generate(port, tmp_path, STREAMS)
    assert load.num_events == load.num_ok > 0


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_a_stream_is_counted_however_it_is_cut(tmp_path: Path, size: int) -> None:
    body = b"".join(b"%x\r\n%b\r\n" % (len(EVENT), EVENT) for _ in range(3)) + b"0\r\n\r\n"
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body
    cut = [answer[i : i + size] for i in range(0, len(answer), size)]
    async with serving(lambda: cut) as (port, num_answers):
        load = await generate(port, tmp_path, STREAMS)
    assert load.num_ok == num_answers[0] > 0
    assert load.num_events == 3 * load.num_ok


async def test_other_statuses_and_closed_connections_are_failures(tmp_path: Path) -> None:
    refused = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}"
    async with serving(lambda: [refused]) as (port, num_answers):
        load = await generate(port, tmp_path, ONE)
    assert (load.num_ok, load.num_failed) == (0, num_answers[0])
    half = b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{}"
    async with serving(lambda: [half, b""]) as (port, num_answers):
        load = await generate(port, tmp_path, ONE, connections=1)
    assert (load.num_ok, load.num_failed) == (0, num_answers[0])
    assert load.num_failed > 0
