"""Fetches an image from an allowed host, with one request that reaches no other host.

The host's name is resolved once, and all of its addresses must be public. The connection goes to
one of these addresses, so a later answer of DNS has no effect. Redirects are not followed. Proxies
are not used, even if the environment names one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import httptools

from pdmesh.core.images.image_bounds import ImageRefused, ImageRules, too_large
from pdmesh.core.images.source import ImageAddress, address_of, is_public
from pdmesh.errors import Overloaded

_READ_BYTES: Final = 65_536
_NAME_THREADS: Final = 4
_MAX_HEAD_BYTES: Final = 16_384  # of an answer
_INTERIM: Final = (100, 102, 103)  # statuses that come before the answer
_MAX_FRAMING_BYTES: Final = 65_536  # of an answer: its head, and the sizes of its chunks


# The list has the tuples of `socket.getaddrinfo`, whose items have various types.
Resolve = Callable[[str, int], list[Any]]


def resolve(host: str, port: int) -> list[Any]:
    """Raises OSError."""
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)


class FetchTime:
    """The time left for all images of one request.

    A place is permission for one of the fetches that may run at the same time. All waits for places
    together may take the full timeout. All fetches together may take the full timeout again,
    because a wait is not the host's fault.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._left_s = {"wait": timeout_s, "fetch": timeout_s}

    @contextlib.asynccontextmanager
    async def spent(self, kind: Literal["wait", "fetch"]) -> AsyncIterator[None]:
        """Count the time spent in this context. Raises TimeoutError when no time is left."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            async with asyncio.timeout(self._left_s[kind]):
                yield
        finally:
            self._left_s[kind] -= loop.time() - begun


@dataclass(frozen=True, slots=True)
class FetchBounds:
    """`timeout_s` is for all images of a request together.

    `max_at_once` bounds the fetches that run at the same time. `max_per_host` is smaller, so that
    one slow host cannot take all places.
    """

    timeout_s: float
    max_at_once: int = 16
    max_per_host: int = 6


class Fetcher:
    """`may_reach` says whether an address from DNS is allowed. `resolve` runs in a thread.

    A hanging DNS look-up occupies its thread even after the timeout. So look-ups have their own
    threads, which do no other work.
    """

    def __init__(
        self,
        rules: ImageRules,
        bounds: FetchBounds,
        may_reach: Callable[[str], bool] = is_public,
        tls: Callable[[], ssl.SSLContext] = ssl.create_default_context,
        resolve: Resolve = resolve,
    ) -> None:
        self._rules, self._bounds, self._may_reach = rules, bounds, may_reach
        self._room = asyncio.Semaphore(bounds.max_at_once)
        # One semaphore for each host. Only allowed hosts get one, so their number is bounded.
        self._room_of_host: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(bounds.max_per_host)
        )
        self._make_tls, self._resolve = tls, resolve
        self._name_threads = ThreadPoolExecutor(_NAME_THREADS, "image-names")
        self._tls: ssl.SSLContext | None = None

    def time_of_request(self) -> FetchTime:
        return FetchTime(self._bounds.timeout_s)

    async def fetch(self, url: str, time: FetchTime) -> bytes:
        """Fetch an image. `time` is the time left for all images of the request.

        Raises ImageRefused, or Overloaded if no place becomes free in that time.
        """
        address = address_of(url, self._rules.hosts)
        async with self._place(address, time):
            return await self._fetched(address, time)

    @contextlib.asynccontextmanager
    async def _place(self, address: ImageAddress, time: FetchTime) -> AsyncIterator[None]:
        """Wait for a place at this host first, so that the wait takes no place from other hosts."""
        async with contextlib.AsyncExitStack() as places:
            try:
                async with time.spent("wait"):
                    await places.enter_async_context(self._room_of_host[address.authority])
                    await places.enter_async_context(self._room)
            except TimeoutError:
                raise Overloaded("this gateway fetches too many images") from None
            yield

    async def _fetched(self, address: ImageAddress, time: FetchTime) -> bytes:
        """Raises ImageRefused."""
        try:
            async with time.spent("fetch"):
                return await self._get(address)
        except TimeoutError:
            message = f"the images of a request were not fetched within {time.timeout_s:g} s"
            raise ImageRefused(message) from None
        except OSError as exc:  # also failures of TLS and DNS
            raise ImageRefused(f"the host cannot be reached: {type(exc).__name__}") from None

    async def _get(self, address: ImageAddress) -> bytes:
        ip = await self._resolved(address)
        tls = self._context() if address.scheme == "https" else None
        reader, writer = await asyncio.open_connection(
            ip, address.port, ssl=tls, server_hostname=address.host if tls else None
        )
        try:
            writer.write(_request(address))
            return await self._read(reader)
        finally:
            # The close is not awaited, because the wait would swallow a cancellation of this task.
            writer.transport.abort()

    async def _resolved(self, address: ImageAddress) -> str:
        loop = asyncio.get_running_loop()
        look_up = partial(self._resolve, address.host, address.port)
        found = await loop.run_in_executor(self._name_threads, look_up)
        ips = [str(info[4][0]) for info in found]
        if not ips or not all(map(self._may_reach, ips)):
            raise ImageRefused("the host's address is not a public one")
        return ips[0]

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = self._make_tls()
        return self._tls

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        answer = _Answer(self._rules)
        parser = httptools.HttpResponseParser(answer)
        answer.status_of = parser.get_status_code
        try:
            while not answer.is_complete:
                data = await reader.read(_READ_BYTES)
                if not data:
                    break
                parser.feed_data(data)
                answer.count(len(data))
                await asyncio.sleep(0)  # `read` lets no other task run if bytes are there
        except httptools.HttpParserError as exc:
            # If a callback raised an error, that error is the context of the parser's error.
            refused = exc.__context__
            if isinstance(refused, ImageRefused):
                raise refused from None
            raise ImageRefused("the host's answer is not valid HTTP") from None
        if not answer.is_complete and not answer.ends_with_connection:
            raise ImageRefused("the host's answer ends too early")
        return bytes(answer.body)


class _Answer:
    """The parser's callbacks."""

    def __init__(self, rules: ImageRules) -> None:
        self._rules = rules
        self._num_left = rules.max_bytes
        self._num_head_left = _MAX_HEAD_BYTES
        self._has_head = False
        self._is_interim = False
        self.status_of: Callable[[], int] = lambda: 0
        self._num_raw_left = rules.max_bytes + _MAX_FRAMING_BYTES
        self.body = bytearray()
        self.is_complete = False
        self.ends_with_connection = False

    def count(self, num_bytes: int) -> None:
        """Count bytes that were read and parsed.

        If the head is incomplete, they are part of the head.
        """
        if not self._has_head:
            self._num_head_left -= min(num_bytes, _MAX_HEAD_BYTES)
            if self._num_head_left < 0:
                raise ImageRefused("the head of the host's answer is too long")
        self._num_raw_left -= num_bytes
        if self._num_raw_left < 0 and not self.is_complete:
            raise ImageRefused("the host's answer has too much beside the image")

    def on_message_begin(self) -> None:
        self.ends_with_connection = True

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case _ if self._has_head:
                raise ImageRefused("the host's answer has trailers")
            case b"content-length":
                self.ends_with_connection = False
                value = value.strip()
                if not value.isdigit() or int(value[:20]) > self._rules.max_bytes:
                    raise too_large(self._rules)
            case b"transfer-encoding":
                self.ends_with_connection = False
            case b"content-encoding" if value.strip().lower() not in (b"", b"identity"):
                raise ImageRefused("the host compressed its answer, which was not asked for")

    def on_headers_complete(self) -> None:
        status = self.status_of()
        if status in _INTERIM:
            self._is_interim = True
            return
        self._has_head = True
        if status != 200:
            raise ImageRefused(f"the host answered with status {status}, not with an image")

    def on_body(self, body: bytes) -> None:
        self._num_left -= len(body)
        if self._num_left < 0:
            raise too_large(self._rules)
        self.body += body

    def on_message_complete(self) -> None:
        self.is_complete = not self._is_interim
        self._is_interim = False


def _request(address: ImageAddress) -> bytes:
    lines = (
        f"GET {address.path} HTTP/1.1",
        f"Host: {address.authority}",
        "User-Agent: pdmesh",
        "Accept: image/png, image/jpeg, image/webp, image/gif",
        "Accept-Encoding: identity",
        "Connection: close",
    )
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")
