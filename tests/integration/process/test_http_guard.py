"""Tests the limits of the mesh's own HTTP server, and the data that it passes to an application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import pytest

from pdmesh.httpd.bounds import Bounds
from pdmesh.httpd.server import HttpServer, listen
from tests.support.waiting import until

MAX_HEAD = 2048
LARGE = 16 << 20  # more data than the kernel buffers while nobody reads
HEAD = b"POST /echo HTTP/1.1\r\nhost: x\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
GET = b"GET /%s HTTP/1.1\r\nhost: x\r\n\r\n"
ONCE = GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
Message = MutableMapping[str, Any]


class Echo:
    """An application that answers with a description of the request. It answers `/early` before it
    reads, `/slow` when the test allows it, and `/large` with a long text.
    """

    def __init__(self) -> None:
        self.num_begun = self.num_gone = 0
        self.may_answer = asyncio.Event()

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        self.num_begun += 1
        body = b""
        if scope["path"] != "/early":
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self.num_gone += 1
                    return
                body += message["body"]
                more = message["more_body"]
        if scope["path"] == "/slow":
            await self.may_answer.wait()
        told = {
            "path": scope["path"],
            "num_body": len(body),
            "headers": [name.decode() for name, _ in scope["headers"]],
        }
        content = json.dumps(told).encode()
        if scope["path"] == "/large":
            content += b" " * LARGE
        length = (b"content-length", str(len(content)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": content})


class Site:
    def __init__(self, bounds: Bounds) -> None:
        self.app, self.bounds = Echo(), bounds
        listener = listen("127.0.0.1", 0, write_timeout_s=5)
        self.server = HttpServer(self.app, listener, bounds, shutdown_s=1, keep_alive_s=1)

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.server.port)

    async def ask(self, *sent: bytes) -> bytes:
        """Send the parts, and return everything that comes back until the server ends the
        connection.
        """
        reader, writer = await self.open()
        answer = b""

        async def read() -> None:
            """Read while the test sends. If nobody reads an answer for a second, the server drops
            the connection, and the answer is lost.
            """
            nonlocal answer
            with suppress(ConnectionError):
                while data := await reader.read(65536):
                    answer += data

        reading = asyncio.create_task(read())
        for part in sent:
            if reading.done():
                break
            writer.write(part)
            await asyncio.sleep(0.01)  # gives each part a packet of its own
        async with asyncio.timeout(60):
            await reading
        writer.transport.abort()
        return answer


@asynccontextmanager
async def serving(**bounds: Any) -> AsyncIterator[Site]:
    site = Site(
        Bounds(
            **{
                "max_header_bytes": MAX_HEAD,
                "receive_timeout_s": 1.0,
                "max_connections": 100,
                "max_connections_per_ip": 100,
                **bounds,
            }
        )
    )
    site.server.start()
    yield site
    site.app.may_answer.set()
    await site.server.stop()
    assert site.bounds.num_open == 0
    assert not site.bounds.num_by_ip
    assert not site.bounds.waiting
    assert not site.bounds.answering


def status_of(answer: bytes) -> int:
    return int(answer[9:12]) if answer else 0


def told(answer: bytes) -> Any:
    return json.loads(answer.partition(b"\r\n\r\n")[2])


@pytest.mark.fault("F29", "F31")
@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        (b"\r\n" * MAX_HEAD, {431}),
        (b"GET /" + b"a" * MAX_HEAD + b" HTTP/1.1\r\nhost: x\r\n\r\n", {431}),
        (HEAD + b"x:" + b" " * MAX_HEAD, {431}),
        (HEAD + b"a:\r\n" * MAX_HEAD, {431}),
        (HEAD + b"a" * 3 * MAX_HEAD, {431}),
        (CHUNKED + b"0" * 3 * MAX_HEAD, {400, 431}),
        (CHUNKED + b"5;" + b"a" * 3 * MAX_HEAD, {431}),
        (CHUNKED + b"1;a=b\r\nx\r\n" * MAX_HEAD, {431}),
        (CHUNKED + b"1\r\nx\r\n" * MAX_HEAD, {431}),
        (CHUNKED + b"0\r\n" + b"a: b\r\n" * MAX_HEAD, {431}),
        (CHUNKED + b"0\r\na:" + b"b" * 3 * MAX_HEAD, {431}),
        (CHUNKED + b"0\r\na:" + b" " * 3 * MAX_HEAD, {431}),
        (GET % b"x" + b"\r\n" * MAX_HEAD, {200, 0}),
    ],
    ids=[
        "lines before the head", "a long path", "space", "many headers", "a long name",
        "a long chunk size", "a chunk extension", "many chunk extensions", "tiny chunks",
        "many trailers", "a long trailer", "space in a trailer", "lines after an answer",
    ],
)  # fmt: skip
@pytest.mark.parametrize("at_once", [True, False])
async def test_the_bytes_outside_the_body_are_bounded(
    sent: bytes, statuses: set[int], at_once: bool
) -> None:
    parts = [sent] if at_once else [sent[i : i + 512] for i in range(0, len(sent), 512)]
    async with serving(receive_timeout_s=30.0) as site:
        answer = await site.ask(*parts)
        assert status_of(answer) in statuses
        assert answer.count(b"HTTP/1.1 4") <= 1
        await until(lambda: not site.server.num_connections)


async def test_a_chunked_body_passes_with_its_framing() -> None:
    """The chunks have 64 bytes, so their framing alone is longer than a head may be."""
    num_chunks = MAX_HEAD
    chunks = b"40\r\n" + b"x" * 64 + b"\r\n"
    async with serving(receive_timeout_s=30.0) as site:
        head = HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        answer = await site.ask(head + chunks * num_chunks + b"0\r\n\r\n")
        assert told(answer)["num_body"] == 64 * num_chunks


@pytest.mark.fault("F31")
async def test_a_trailer_never_becomes_a_header() -> None:
    async with serving() as site:
        head = HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        answer = await site.ask(head + b"1\r\nx\r\n0\r\nauthorization: Bearer x\r\n\r\n")
        assert told(answer)["headers"] == ["host", "connection", "transfer-encoding"]
        assert told(answer)["num_body"] == 1


async def test_an_early_answer_ends_the_connection_and_is_read_whole() -> None:
    async with serving(receive_timeout_s=30.0) as site:
        head = b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n"
        answer = await site.ask(head, *[b"x" * 65536] * 20)
        assert status_of(answer) == 200
        assert b"connection: close\r\n" in answer
        assert told(answer)["path"] == "/early"


async def test_an_answer_to_a_whole_request_keeps_the_connection() -> None:
    async with serving() as site:
        reader, writer = await site.open()
        for path in (b"one", b"two"):
            for part in (
                b"POST /%s HTTP/1.1\r\nhost: x\r\n" % path,
                b"content-length: 3\r\n\r\n",
                b"abc",
            ):
                writer.write(part)
                await asyncio.sleep(0.01)
            answer = await reader.readuntil(b"}")
            assert b"connection: close" not in answer
            assert told(answer)["path"] == f"/{path.decode()}"
        writer.close()


@pytest.mark.parametrize(
    "parts",
    [
        (GET % b"first", GET % b"slow"),
        (GET % b"first" + b"GET /slow HT", b"TP/1.1\r\nhost: x\r\n\r\n"),
    ],
    ids=["whole", "in two parts"],
)
async def test_an_answer_may_take_longer_than_an_idle_connection_is_kept(
    parts: tuple[bytes, bytes],
) -> None:
    """A server closes connections that are idle for too long. A connection is no longer idle when
    its next request begins.
    """
    async with serving() as site:
        reader, writer = await site.open()
        for part, num_begun in zip(parts, (1, 2), strict=True):
            writer.write(part)
            await until(lambda: site.app.num_begun == num_begun)  # noqa: B023
            if num_begun == 1:
                assert b"first" in await reader.readuntil(b"}")
        # While the first connection waits for its answer, the server closes a second connection,
        # which became idle later.
        idle_reader, idle_writer = await site.open()
        idle_writer.write(GET % b"idle")
        assert b"idle" in await idle_reader.read()
        assert not reader.at_eof()
        site.app.may_answer.set()
        assert b"slow" in await reader.readuntil(b"}")
        for each in (writer, idle_writer):
            each.close()


@pytest.mark.parametrize("part", [b"\r\n", b"\n"])
async def test_empty_lines_keep_no_idle_connection(part: bytes) -> None:
    """A server closes connections that are idle for too long. Once, each empty line counted as the
    beginning of a request, so the connection was never idle.
    """
    async with serving(receive_timeout_s=600.0) as site:
        reader, writer = await site.open()
        writer.write(GET % b"x")
        assert status_of(await reader.read(4096)) == 200

        async def trickle() -> None:
            while True:
                writer.write(part)
                await asyncio.sleep(0.05)

        trickling = asyncio.create_task(trickle())
        async with asyncio.timeout(60):
            # Some bytes were on their way when the server closed.
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        trickling.cancel()
        writer.transport.abort()


@pytest.mark.fault("F29")
@pytest.mark.parametrize(
    "sent",
    [
        b"", b"\r\n", b"GET", HEAD, HEAD + b"content-length: 9\r\n\r\nabc", CHUNKED, CHUNKED + b"3",
        CHUNKED + b"3\r\nab", CHUNKED + b"0\r\n", CHUNKED + b"0\r\na: b\r\n",
    ],
)  # fmt: skip
async def test_a_stalled_request_is_cut_in_time(sent: bytes) -> None:
    async with serving(receive_timeout_s=0.3) as site:
        assert status_of(await site.ask(sent)) == 408
        assert site.app.num_gone == site.app.num_begun


@pytest.mark.fault("F29")
async def test_half_a_request_after_a_whole_one_is_cut_and_causes_no_second_answer() -> None:
    async with serving(receive_timeout_s=0.3) as site:
        answer = await site.ask(GET % b"slow" + HEAD + b"content-length: 9\r\n\r\nabc")
        assert answer == b"", "a client would take these bytes for the answer to its first request"


@pytest.mark.fault("F31")
async def test_paths_reach_the_application_as_they_were_sent() -> None:
    async with serving() as site:
        end = b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        for sent, path in (
            (b"/v1%2fmodels", "/v1%2fmodels"), (b"/%76%31", "/%76%31"), (b"/a?b=/c", "/a"),
            (b"http://x/a%20b", "/a%20b"), (b"/a/../b", "/a/../b"),
        ):  # fmt: skip
            assert told(await site.ask(b"GET " + sent + end))["path"] == path


@pytest.mark.fault("F31")
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nhost: a\r\n\r\n", 505),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n", 400),
        (b"OPTIONS * HTTP/1.1\r\nhost: a\r\n\r\n", 200),
    ],
)
async def test_a_head_that_violates_the_rfc_never_reaches_the_application(
    sent: bytes, status: int
) -> None:
    async with serving(receive_timeout_s=10.0) as site:
        assert status_of(await site.ask(sent)) == status
        assert site.app.num_begun == (status == 200)


async def test_an_offered_upgrade_is_ignored_and_nothing_behind_it_is_lost() -> None:
    upgrade = b"GET /a HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    async with serving() as site:
        answer = await site.ask(upgrade + upgrade + GET % b"last")
        assert answer.count(b"HTTP/1.1 200") == 3
        assert b'"/last"' in answer


@pytest.mark.fault("F29")
async def test_a_full_listener_drops_the_connection_that_waited_longest() -> None:
    async with serving(receive_timeout_s=30.0, max_connections_per_ip=10, makes_room=True) as site:
        reader, writer = await site.open()
        writer.write(GET % b"slow")
        await until(lambda: site.app.num_begun)
        idle = [await site.open() for _ in range(40)]
        await until(lambda: site.bounds.num_refused >= 31)
        assert site.bounds.num_open <= 10
        assert told(await site.ask(ONCE % b"new"))
        site.app.may_answer.set()
        assert told(await reader.readuntil(b"}"))["path"] == "/slow", (
            "a connection whose request is being answered stays"
        )
        for _, each in idle:
            each.transport.abort()
        writer.close()


@pytest.mark.fault("F29")
async def test_refused_requests_that_never_end_do_not_fill_a_port_that_makes_room() -> None:
    """The server keeps the connections of refused requests for a while, so that the answers
    arrive.
    """
    async with serving(receive_timeout_s=30.0, max_connections_per_ip=10, makes_room=True) as site:
        head = b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"
        for _ in range(3):
            others = [await site.open() for _ in range(10)]
            for reader, writer in others:
                writer.write(head)
                assert status_of(await reader.read(4096)) in {0, 200}
            assert told(await site.ask(ONCE % b"new"))["path"] == "/new"
            for _, writer in others:
                writer.transport.abort()


@pytest.mark.fault("F28", "F29")
async def test_clients_that_do_not_read_do_not_fill_a_port_that_makes_room() -> None:
    async with serving(receive_timeout_s=30.0, max_connections_per_ip=10, makes_room=True) as site:
        others = [await site.open() for _ in range(10)]
        for reader, writer in others:
            cast("asyncio.ReadTransport", writer.transport).pause_reading()
            assert reader is not None
            writer.write(GET % b"large" * 10)
        await until(lambda: site.app.num_begun >= 20)
        assert told(await site.ask(ONCE % b"new"))["path"] == "/new"
        for _, writer in others:
            writer.transport.abort()


async def test_a_stop_ends_idle_keepalive_connections() -> None:
    async with serving() as site:
        reader, writer = await site.open()
        writer.write(GET % b"x")
        assert status_of(await reader.read(4096)) == 200
        stopping = asyncio.create_task(site.server.stop())
        assert await reader.read() == b""
        await stopping
        writer.close()
