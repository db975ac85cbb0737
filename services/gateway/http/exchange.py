"""One HTTP request and its answer, on raw ASGI.

An exchange bounds the request's body, writes the answer, and detects that the client has left. If a
client does not read, only the task that writes to this client is blocked. `gateway/slow_clients.py`
disconnects such clients.

Before an error answer, the gateway reads the rest of the request, within bounds. The connection can
then be used again. Without this reading, a proxy might reset its client's HTTP/2 stream, because
the answer came before the end of the request. The client would then see no status.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Final, Protocol
from urllib.parse import parse_qsl

from pdmesh.errors import InvalidRequest, InvalidToken, MeshError, Overloaded
from pdmesh.httpd.guard import CONNECTION
from pdmesh.services.gateway.http.errors import OPENAI_ERRORS, ErrorFormat
from pdmesh.services.gateway.openai.unknown_fields import header_of
from pdmesh.services.gateway.request.deltas import ClientDisconnected
from pdmesh.services.gateway.request.frontend import new_request_id
from pdmesh.v1.scheduler_service_pb2 import HandedPlan

# The values are Any because ASGI's messages and scopes are plain dicts.
Scope = MutableMapping[str, Any]
AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_NO_PARAMETERS: Mapping[str, str] = MappingProxyType({})
_JSON = (b"content-type", b"application/json")
# The bounds for reading the rest of a refused request.
_MAX_REST_BYTES: Final = 1 << 20
_MAX_REST_S: Final = 2.0
_QUOTABLE: Final = frozenset(map(chr, range(0x20, 0x7F))) - {'"', "\\"}  # RFC 6750, 3


class Connection(Protocol):
    """The client's connection. When the connection ends, it calls the function given to `watch`."""

    @property
    def is_gone(self) -> bool: ...

    def watch(self, on_gone: Callable[[], None]) -> None: ...

    def unwatch(self) -> None: ...

    def abort(self) -> None: ...


class BodyTooLarge(InvalidRequest):
    grpc_code, http_status, default_reason = "RESOURCE_EXHAUSTED", 413, "BODY_TOO_LARGE"


class WrongMethod(InvalidRequest):
    grpc_code, http_status, default_reason = "UNIMPLEMENTED", 405, "METHOD_NOT_ALLOWED"

    def __init__(self, allowed: str) -> None:
        super().__init__(f"use {allowed} for this path")
        self.allowed = allowed


class BodyRoom:
    """Bounds the total size of all request bodies that are being received (F31).

    Thousands of connections may each send a large body at the same time. A body that arrives as one
    message is not counted.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises Overloaded."""
        if self.num_bytes + num_bytes > self._max_bytes:
            raise Overloaded("too many large requests are being received")
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


class HttpExchange:
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.request_id = new_request_id()
        self.has_started = False
        self._is_received = False  # whether the whole request was received
        self.ignored_fields: list[str] = []  # unknown fields, which a header of the response names
        self.path_parameters: Mapping[str, str] = _NO_PARAMETERS
        self._query: bytes = scope.get("query_string", b"")
        self.errors: ErrorFormat = OPENAI_ERRORS
        self.handed: HandedPlan | None = None
        self.blocked_since = math.inf
        # ASGI passes a list of pairs. Of several headers with one name, the first is used.
        self._headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        self._receive = receive
        self._send = send
        self.connection: Connection = scope[CONNECTION]

    def header(self, name: bytes) -> str:
        """The value of a header, empty if absent. `name` is in lower case."""
        return str(self._headers.get(name, b""), "latin-1")

    def use(self, handed: HandedPlan | None) -> None:
        """Use the plan that an endpoint picker got from the master for this request, if any.

        The exchange takes over the plan's request id, under which the master counts the request as
        load.
        """
        if handed is not None:
            self.handed, self.request_id = handed, handed.result.request_id

    @property
    def query(self) -> Mapping[str, str]:
        """The fields after `?`. Of several fields with one name, the last is used."""
        return dict(parse_qsl(self._query.decode("latin-1"), keep_blank_values=True))

    @property
    def authorization(self) -> str:
        """The API key or the OpenID provider's token, in the form of the header `authorization`.

        Clients of Anthropic's API may send the key in `x-api-key` instead.
        """
        return authorization_of(self.header(b"authorization"), self.header(b"x-api-key"))

    async def body(self, max_bytes: int, room: BodyRoom) -> bytes:
        """Read the body.

        Raises BodyTooLarge (without reading the rest), Overloaded if `room` is full, and
        ClientDisconnected.
        """
        announced = self.header(b"content-length")
        if announced.isdigit() and int(announced) > max_bytes:
            raise BodyTooLarge(f"the body is over {max_bytes} bytes")
        message = await self._next_message()
        if not message.get("more_body", False) and len(message["body"]) <= max_bytes:
            return bytes(message["body"])
        body = bytearray()
        try:
            while True:
                room.take(len(message["body"]))
                body += message["body"]
                if len(body) > max_bytes:
                    raise BodyTooLarge(f"the body is over {max_bytes} bytes")
                if not message.get("more_body", False):
                    return bytes(body)
                message = await self._next_message()
        finally:
            room.give_back(len(body))

    async def _next_message(self) -> AsgiMessage:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        self._is_received = not message.get("more_body", False)
        return message

    async def _drop_rest(self) -> None:
        """Read and drop the rest of the request, within bounds. Raises ClientDisconnected.

        Nothing is read if `content-length` is over the bound. Nothing is read either if the client
        waits for `100 Continue`, because reading would make the server ask for the body.
        """
        announced = self.header(b"content-length")
        is_long = announced.isdigit() and int(announced) > _MAX_REST_BYTES
        if is_long or self.header(b"expect").lower() == "100-continue":
            return
        num_dropped = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MAX_REST_S):
                while not self._is_received and num_dropped <= _MAX_REST_BYTES:
                    num_dropped += len((await self._next_message())["body"])

    async def start(self, status: int, headers: Headers) -> None:
        self.has_started = True
        request_id = self.request_id.encode()
        headers += [(name, request_id) for name in self.errors.request_id_headers]
        if self.ignored_fields:
            headers.append(header_of(self.ignored_fields))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        self.blocked_since = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})
        self.blocked_since = math.inf

    async def json(self, body: bytes, status: int = 200, headers: Headers | None = None) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, [_JSON, length, *(headers or [])])
        await self.write(body, is_last=True)

    async def error(self, error: MeshError) -> None:
        """Answer with the error. Raises ClientDisconnected."""
        await self._drop_rest()
        with contextlib.suppress(OSError):
            body = self.errors.body(error, self.request_id)
            await self.json(body, error.http_status, error_headers(error))

    def watched(self) -> AbstractContextManager[None]:
        """A context for work that is useless without the client.

        If the client disconnects, the work is cancelled, and the context raises ClientDisconnected.
        """
        return _Watched(self.connection)

    def cut(self) -> None:
        """Disconnect a client that does not read.

        The task that waits in `write` then gets an error.
        """
        self.connection.abort()


class _Watched:
    """Watches the connection while the current task works. See `HttpExchange.watched`."""

    __slots__ = ("_connection", "_has_left", "_task")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._has_left = False
        task = asyncio.current_task()
        assert task is not None
        self._task = task

    def __enter__(self) -> None:
        if self._connection.is_gone:
            raise ClientDisconnected
        self._connection.watch(self._leave)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._connection.unwatch()
        is_for_client = isinstance(error, asyncio.CancelledError) and self._has_left
        if is_for_client and not self._task.uncancel():
            raise ClientDisconnected from None

    def _leave(self) -> None:
        self._has_left = True
        self._task.cancel()


def authorization_of(authorization: str, api_key: str) -> str:
    """The argument for `AccessControl`, from the headers `authorization` and `x-api-key`."""
    return authorization or (f"Bearer {api_key}" if api_key else "")


def error_headers(error: MeshError) -> Headers:
    """The headers that tell clients how to react to an error."""
    headers: Headers = []
    if error.retry_after_ms is not None:
        seconds = max(1, math.ceil(error.retry_after_ms / 1000))
        headers.append((b"retry-after", str(seconds).encode()))
    if error.http_status == 401:
        headers.append((b"www-authenticate", _challenge(error)))
    if isinstance(error, WrongMethod):
        headers.append((b"allow", error.allowed.encode()))
    return headers


def _challenge(error: MeshError) -> bytes:
    """The value of `www-authenticate`: the scheme, and the error of a bad token (RFC 6750, 3)."""
    if not isinstance(error, InvalidToken):
        return b"Bearer"
    text = "".join(c if c in _QUOTABLE else "?" for c in error.message)
    return f'Bearer error="invalid_token", error_description="{text}"'.encode()
