"""Fuzzes the gateway's HTTP framing with random bytes in pieces of any size.

`feed` raises only if one of these promises is broken. The gateway sends only whole responses, at
most one for each request and one refusal. The application sees no header that could be read as two
headers. A connection that ends leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final

import uvicorn
from uvicorn.server import ServerState

from pdmesh.httpd.bounds import Bounds
from pdmesh.httpd.guard import guarded

MAX_LEN: Final = 16_384
_MAX_HEADER_BYTES: Final = 1024
_MOST_SAID: Final = 512  # the most bytes of a response
_SHORTEST: Final = len(b"GET / HTTP/1.1\n\n")
_STATUS: Final = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_STATUSES: Final = {
    b"100",
    b"200",
    b"400",
    b"408",
    b"411",
    b"413",
    b"414",
    b"417",
    b"431",
    b"501",
    b"505",
}
_HEAD: Final = 1  # bytes at the beginning of an input, which give the size of its pieces

Message = dict[str, Any]


class _App:
    """An application that reads each whole request and answers it."""

    def __init__(self) -> None:
        self.scopes: list[dict[str, Any]] = []
        self.num_body = 0

    async def __call__(
        self,
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        self.scopes.append(scope)
        while True:
            event = await receive()
            if event["type"] == "http.disconnect":
                return
            self.num_body += len(event["body"])
            if not event.get("more_body"):
                break
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


class _Transport(asyncio.Transport):
    """A transport that accepts all output.

    As with a socket, the protocol learns of the transport's end in the event loop's next turn.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__({"peername": ("127.0.0.66", 1), "sockname": ("127.0.0.1", 2)})
        self._loop = loop
        self.protocol: Any
        self.written = b""
        self.is_lost = self._is_closing = self.has_ended = False

    def write(self, data: Any) -> None:
        assert not self.is_lost, "written to after its end"
        self.written += bytes(data)

    def write_eof(self) -> None:
        self.has_ended = True

    def can_write_eof(self) -> bool:
        return True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._loop.call_soon(self.lose)

    def abort(self) -> None:
        self.close()

    def lose(self) -> None:
        self._is_closing = True
        if not self.is_lost:
            self.is_lost = True
            self.protocol.connection_lost(None)


async def _feed(pieces: list[bytes]) -> None:
    loop = asyncio.get_running_loop()
    found: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: found.append(context))
    app, state = _App(), ServerState()
    config = uvicorn.Config(
        app, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False
    )
    config.load()
    logging.disable()  # suppress the logs of refusals
    bounds = Bounds(_MAX_HEADER_BYTES, 60.0, 10, 10)
    protocol: Any = guarded(bounds)
    transport = _Transport(loop)
    transport.protocol = protocol(config=config, server_state=state, app_state={}, _loop=loop)
    transport.protocol.connection_made(transport)
    for piece in pieces:
        if transport.is_closing():
            break
        transport.protocol.data_received(piece)
        for _ in range(3):
            await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    if not (transport.has_ended or transport.is_closing()):
        num_framing = sum(map(len, pieces)) - app.num_body
        allowed = len(app.scopes) * bounds.max_header_bytes + bounds.max_framing_bytes(app.num_body)
        assert num_framing <= allowed + max(map(len, pieces)), (
            "the bytes outside the body are bounded"
        )
    transport.lose()
    if state.tasks:
        await asyncio.wait(state.tasks, timeout=60)
    assert not state.tasks, "a request outlives its connection"
    assert not state.connections
    assert not found, found
    assert (bounds.num_open, bounds.num_by_ip) == (0, {})
    _check(app, transport.written, sum(map(len, pieces)))


def _check(app: _App, written: bytes, num_sent: int) -> None:
    num_asked = len(app.scopes)
    assert num_asked * _SHORTEST <= num_sent, "a request that was not sent"
    assert app.num_body <= num_sent
    statuses = _STATUS.findall(written)
    assert written.startswith(b"HTTP/1.1 ") or not written
    assert set(statuses) <= _STATUSES, statuses
    assert statuses.count(b"200") <= num_asked
    assert len(statuses) - statuses.count(b"100") <= num_asked + 1, "one refusal, and the end"
    assert len(written) <= _MOST_SAID * (num_asked + 1)
    for scope in app.scopes:
        assert isinstance(scope["path"], str)
        assert not set("\r\n\0") & set(scope["raw_path"].decode("latin-1"))
        size = 0
        for name, value in scope["headers"]:
            assert name, "a header without a name"
            assert name == name.lower()
            assert not set(b"\r\n\0: ") & set(name)
            assert not set(b"\r\n\0") & set(value)
            size += len(name) + len(value)
        assert size <= _MAX_HEADER_BYTES + MAX_LEN * (size <= num_sent), (
            "headers that were not sent"
        )


_loop = asyncio.new_event_loop()


def feed(data: bytes) -> None:
    """Feed one input. Its first byte is the size of the pieces of the rest; 0 means one piece."""
    if len(data) <= _HEAD:
        return
    rest = data[_HEAD:]
    size = data[0] or len(rest)
    # limit the pieces, because each piece takes a turn of the event loop
    size = max(size, len(rest) // 64)
    _loop.run_until_complete(_feed([rest[i : i + size] for i in range(0, len(rest), size)]))


def honest() -> bytes:
    body = b"a" * (MAX_LEN - 200)
    return (
        b"\xff"
        + b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        + body
    )


def seeds() -> dict[str, bytes]:
    post = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    streams = [
        b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n" * 3,
        post + b"content-length: 5\r\n\r\nhello",
        post + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        post
        + b"transfer-encoding: chunked\r\n\r\n1;x=y\r\na\r\n0\r\nx: y\r\n\r\n"
        + post
        + b"\r\n",
        post + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        post + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
        post + b"expect: 100-continue\r\ncontent-length: 1\r\n\r\na",
        post + b"upgrade: websocket\r\nconnection: upgrade\r\n\r\n\0\1",
        b"GET / HTTP/1.0\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /v1%2fmodels?a=b HTTP/1.1\r\nhost: x\r\nhost: y\r\nx:\r\n  folded\r\n\r\n",
        post + b"x: " + b"a" * 1200 + b"\r\n\r\n",
        b"\x16\x03\x01\x00\xa5",
    ]
    return {f"stream-{i:02}": bytes([7 * (i % 3)]) + each for i, each in enumerate(streams)}
