"""An image is fetched from an allowed host with one request.

The address is checked, and size and time are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from pdmesh.core.images.image_bounds import ImageRefused, ImageRules
from pdmesh.errors import Overloaded
from pdmesh.services.gateway.images.fetching import FetchBounds, Fetcher, FetchTime
from tests.support.images.files import png
from tests.support.waiting import until

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
PNG = png(1)


class Host:
    """A server on a loopback address. The test's DNS knows the server's name."""

    def __init__(self, answer: Answer) -> None:
        self.heads: list[bytes] = []
        self._answer = answer

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append(await reader.readuntil(b"\r\n\r\n"))
        with contextlib.suppress(ConnectionError):
            await self._answer(reader, writer)
            await writer.drain()
        writer.close()


def says(*parts: bytes) -> Answer:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.writelines(parts)

    return answer


def whole(body: bytes = PNG, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


@contextlib.asynccontextmanager
async def host(answer: Answer) -> AsyncIterator[tuple[Host, int]]:
    found = Host(answer)
    server = await asyncio.start_server(found.handle, "127.0.0.1", 0)
    async with server:
        yield found, server.sockets[0].getsockname()[1]


async def fetched(
    port: int, max_bytes: int = 10_000, timeout_s: float = 30.0, *, path: str = "/a"
) -> bytes:
    rules = ImageRules(max_bytes=max_bytes, hosts=frozenset({f"localhost:{port}"}))
    fetcher = Fetcher(
        rules, FetchBounds(timeout_s), may_reach=lambda ip: ip in ("127.0.0.1", "::1")
    )
    return await fetcher.fetch(f"http://localhost:{port}{path}", FetchTime(timeout_s))


CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKED = (
    CHUNKED_HEAD
    + b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in (PNG[:10], PNG[10:]))
    + b"0\r\n\r\n"
)


@pytest.mark.parametrize(
    "answer",
    [
        whole(),
        CHUNKED,
        b"HTTP/1.1 200 OK\r\n\r\n" + PNG,
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + whole(),
        b"HTTP/1.1 100 Continue\r\n\r\n" * 2 + whole(),
    ],
)
async def test_an_image_is_fetched_with_one_plain_request(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with host(says(answer)) as (served, port):
        assert await fetched(port, path="/a?b=c") == PNG
    (head,) = served.heads
    assert head.startswith(b"GET /a?b=c HTTP/1.1\r\n")
    assert b"Host: localhost:%d\r\n" % port in head
    assert b"Accept-Encoding: identity" in head
    assert not {b"cookie", b"authorization", b"referer"} & {
        line.split(b":")[0].lower() for line in head.split(b"\r\n")
    }


@pytest.mark.parametrize(
    ("answer", "says_"),
    [
        (whole(b"", "302 Found", "Location: http://127.0.0.1/"), "status 302"),
        (whole(b"", "301 Moved", "Location: /b"), "status 301"),
        (whole(PNG, "404 Not Found"), "status 404"),
        (whole(bytes(10_001)), "10000 bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(20_000), "10000 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\n", "bytes|HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "bytes|HTTP"),
        (whole(PNG, "200 OK", "Content-Encoding: gzip"), "compressed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort", "too early"),
        (b"HTTP/1.1 200 OK\r\nA: " + b"a" * 100_000, "head"),
        (b"SSH-2.0-OpenSSH\r\n", "HTTP"),
        (b"", "too early"),
        (CHUNKED_HEAD + b"1\r\na\r\n" * 20_000, "beside the image|10000 bytes"),
        (CHUNKED_HEAD + b"1;" + b"x" * 200_000, "beside the image|HTTP"),
        (CHUNKED_HEAD + b"0\r\nA: b\r\n\r\n", "trailers"),
    ],
)
async def test_any_other_answer_is_refused(answer: bytes, says_: str) -> None:
    async with host(says(answer)) as (served, port):
        with pytest.raises(ImageRefused, match=says_):
            await fetched(port)
    assert len(served.heads) == 1  # the redirect was not followed


async def test_a_slow_host_is_given_up() -> None:
    never = asyncio.Event()

    async def drips(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\na")
        await never.wait()

    async with host(drips) as (_, port):
        with pytest.raises(ImageRefused, match=r"within 0\.3 s"):
            await fetched(port, timeout_s=0.3)
        never.set()


async def test_a_host_that_is_away_is_an_error_of_the_request() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(ImageRefused, match="cannot be reached"):
        await fetched(port)


@pytest.mark.fault("F30")
@pytest.mark.parametrize(
    "ips", [["127.0.0.1"], ["10.1.2.3"], ["93.184.216.34", "127.0.0.1"], ["::1"], []]
)
async def test_a_name_with_any_address_that_is_not_public_is_refused(
    ips: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One address that is not public is enough for a refusal. Nothing is connected."""

    def resolve(*_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 80)) for ip in ips]

    async def connect(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing may be connected")

    monkeypatch.setattr(asyncio, "open_connection", connect)
    fetcher = Fetcher(
        ImageRules(hosts=frozenset({"example.org"})), FetchBounds(5.0), resolve=resolve
    )
    with pytest.raises(ImageRefused, match="not a public one"):
        await fetcher.fetch("http://example.org/a.png", fetcher.time_of_request())


async def test_the_connection_goes_to_the_address_that_was_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second answer of DNS would be another address, so DNS must not be asked twice."""
    answers = iter([["93.184.216.34"], ["127.0.0.1"]])
    connected: list[tuple[Any, ...]] = []

    def resolve(*_: Any) -> list[Any]:
        ips = next(answers)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 443)) for ip in ips]

    async def connect(ip: str, port: int, **tls: Any) -> None:
        connected.append((ip, port, tls["server_hostname"]))
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncio, "open_connection", connect)
    fetcher = Fetcher(
        ImageRules(hosts=frozenset({"example.org"})), FetchBounds(5.0), resolve=resolve
    )
    with pytest.raises(ImageRefused, match="ConnectionRefusedError"):
        await fetcher.fetch("https://example.org/a.png", fetcher.time_of_request())
    assert connected == [("93.184.216.34", 443, "example.org")]


@pytest.mark.fault("F30")
async def test_names_that_hang_keep_no_thread_of_others() -> None:
    """A timeout ends the wait for DNS, but not the thread that asks DNS."""
    may_end = threading.Event()

    def resolve(*_: Any) -> list[Any]:
        may_end.wait()
        return []

    num_fetches = 2 * ((os.cpu_count() or 1) + 4)  # twice the threads that the default executor has
    rules = ImageRules(hosts=frozenset({"example.org"}))
    fetcher = Fetcher(rules, FetchBounds(0.05, num_fetches, num_fetches), resolve=resolve)
    fetches = [
        fetcher.fetch("http://example.org/a.png", fetcher.time_of_request())
        for _ in range(num_fetches)
    ]
    try:
        for failure in await asyncio.gather(*fetches, return_exceptions=True):
            assert isinstance(failure, ImageRefused)
        async with asyncio.timeout(60):
            assert await asyncio.to_thread(lambda: "done") == "done"
    finally:
        may_end.set()


async def test_a_head_that_comes_in_pieces_counts_only_its_own_bytes() -> None:
    """The read that ends the head may already contain much of the image."""
    large = PNG + bytes(60_000)
    answer = whole(large, "200 OK", "Content-Type: image/png ")

    async def pieces(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer[:20])
        await writer.drain()
        await asyncio.sleep(0)
        writer.write(answer[20:])

    async with host(pieces) as (_, port):
        assert await fetched(port, 100_000) == large


async def test_nothing_waits_for_the_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancellation during such a wait would be lost."""

    async def wait(_: asyncio.StreamWriter) -> None:
        raise AssertionError("nothing may wait")

    async with host(says(whole())) as (_, port):
        monkeypatch.setattr(asyncio.StreamWriter, "wait_closed", wait)
        assert await fetched(port) == PNG


async def test_a_wait_for_a_place_is_not_the_fault_of_the_host() -> None:
    rules = ImageRules(hosts=frozenset({"example.org"}))
    fetcher = Fetcher(rules, FetchBounds(0.05, max_at_once=0))
    with pytest.raises(Overloaded):
        await fetcher.fetch("http://example.org/a.png", fetcher.time_of_request())


@pytest.mark.fault("F30")
async def test_a_slow_host_leaves_places_to_others() -> None:
    """There are two places. The slow host may fill only one of them, so the other host answers."""
    may_end = asyncio.Event()

    async def hangs(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_end.wait()
        writer.write(whole())

    async with host(hangs) as (slow, slow_port), host(says(whole())) as (_, port):
        hosts = frozenset(f"localhost:{each}" for each in (slow_port, port))
        fetcher = Fetcher(
            ImageRules(hosts=hosts), FetchBounds(60.0, 2, 1), may_reach=lambda _: True
        )

        def fetch(port: int) -> asyncio.Task[bytes]:
            url = f"http://localhost:{port}/a"
            return asyncio.create_task(fetcher.fetch(url, fetcher.time_of_request()))

        slow_ones = [fetch(slow_port) for _ in range(4)]
        await until(lambda: slow.heads)
        assert await fetch(port) == PNG
        assert len(slow.heads) == 1
        may_end.set()
        # the places of the slow host are free again
        assert await asyncio.gather(*slow_ones) == [PNG] * 4


async def test_the_images_of_a_request_have_one_time_together() -> None:
    """The time that a slow host uses up is lost for the request's next image, but not for the next
    request.
    """
    never = asyncio.Event()

    async def hangs(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await never.wait()

    async with host(hangs) as (_, slow_port), host(says(whole())) as (_, port):
        hosts = frozenset(f"localhost:{each}" for each in (slow_port, port))
        fetcher = Fetcher(ImageRules(hosts=hosts), FetchBounds(60.0), may_reach=lambda _: True)
        time = FetchTime(0.1)
        for each in (slow_port, port):
            with pytest.raises(ImageRefused, match="images of a request"):
                await fetcher.fetch(f"http://localhost:{each}/a", time)
        url = f"http://localhost:{port}/a"
        assert await fetcher.fetch(url, fetcher.time_of_request()) == PNG
        never.set()
