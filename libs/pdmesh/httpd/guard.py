"""uvicorn's HTTP protocol with bounds on connections, time, and bytes outside the body (F29).

Without these bounds, an idle or slow connection stays forever, heads and trailers of any size are
kept in memory, and one address can use up all file descriptors. A streamed answer may take any
time, because the clock stops when the whole request has arrived.

If the server ends a connection before the whole request has arrived, the server sends its answer
and closes its sending half. It then reads and drops the client's further bytes, within bounds on
bytes and time, as nginx's `lingering_close` does. If the server closed the connection at once, the
kernel would discard the answer because of the unread bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pdmesh.httpd.bounds import Bounds
from pdmesh.httpd.message_rules import refusal

# A key of the ASGI scope. Its value is the connection, whose `watch` calls back when the client
# leaves. So no task has to wait for this event.
CONNECTION: Final = "pdmesh.connection"
# The most requests of a client that may wait for their answers. No client needs more, but a full
# buffer could hold thousands.
_MAX_PIPELINED: Final = 16
# After the server has ended a connection, it waits at most this time for the client's end, and
# reads at most this many bytes.
_LINGER_S: Final = 2.0
_MAX_DROPPED_BYTES: Final = 1 << 20


class GuardRefused(Exception):
    """Raised in a callback to stop the parser, which turns it into an HttpParserError."""


def guarded(within: Bounds) -> Callable[..., HttpToolsProtocol]:
    """Make a protocol class with these bounds, for uvicorn's `http` setting."""

    class Guarded(_Guarded):
        bounds = within

    return Guarded


class _Guarded(HttpToolsProtocol):
    bounds: Bounds
    is_gone = False
    _ip = ""
    _is_admitted = False
    _is_counted = False
    _num_framing = 0  # bytes of the current request that are not its body
    _num_field_bytes = 0  # the part of these bytes that the parser has passed on
    _num_body = 0
    _is_in_head = False
    _is_whole = True  # false while only a part of a request has arrived
    _is_ending = False
    _num_dropped = 0  # bytes that arrived after `end` and were not used
    _is_stopping = False
    _status = HTTPStatus.BAD_REQUEST  # the status for a request that stops the parser
    _keeps_alive = False  # whether the client asked for keep-alive
    _deadline: asyncio.TimerHandle | None = None
    _on_gone: Callable[[], None] | None = None  # called if the client leaves during an answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._ip = str((transport.get_extra_info("peername") or ("",))[0])
        if not self.bounds.enter(self._ip):
            cast("asyncio.Transport", transport).abort()
            return
        self._is_admitted = self._is_counted = True
        super().connection_made(cast("asyncio.Transport", transport))
        self.bounds.waits(self._ip, self.abort)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_admitted:
            return
        self._leave()
        self._stop_clock()
        self._go()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_admitted:
            return
        if self._is_ending:
            self._drop(len(data))
            return
        rest = memoryview(data)
        while rest and not self._is_ending:
            # Parse in pieces, so that a too large request is refused before all of it is parsed.
            size = min(len(rest), self.bounds.max_header_bytes)
            rest = rest[self._feed(rest[:size]) :]
        if not self._is_whole and not self._is_ending and self._deadline is None:
            self._start_clock()

    def _drop(self, num_bytes: int) -> None:
        self._num_dropped += num_bytes
        if self._num_dropped > _MAX_DROPPED_BYTES:
            self.flow.pause_reading()

    def _feed(self, piece: memoryview) -> int:
        """Parse a piece, and return how many of its bytes were used."""
        num_taken = len(piece)
        self._num_framing += num_taken
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as exc:
            num_taken = max(1, exc.args[0])  # the upgrade is refused, so HTTP continues
            self._num_framing = 0
        except httptools.HttpParserError:
            self._refuse(self._status)
            return num_taken
        # If a request ended within the piece, the bytes after it belong to the next request.
        self._num_framing = max(0, self._num_framing)
        if self._num_framing > self.bounds.max_framing_bytes(self._num_body):
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        return num_taken

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Call `on_gone` when the client has gone or closes its sending half, until `unwatch`."""
        if self.is_gone:
            on_gone()
        else:
            # uvicorn stops reading after a large body, so it would not notice the client's end.
            self.flow.resume_reading()
            self._on_gone = on_gone

    def unwatch(self) -> None:
        self._on_gone = None

    def abort(self) -> None:
        """Drop the connection and its unsent bytes. An orderly close would wait for the client."""
        self._leave()
        self.transport.abort()

    def shutdown(self) -> None:
        self._is_stopping = True
        if self._is_ending:
            self.transport.abort()
        else:
            super().shutdown()

    def on_response_complete(self) -> None:
        if self._is_ending:
            return
        super().on_response_complete()
        if not self._is_whole:
            self._unset_keepalive_if_required()  # a part of the next request is already there
        elif self.cycle.response_complete and self._is_counted:
            self.bounds.waits(self._ip, self.abort)

    # httptools calls the following methods, which have no types upstream.
    def on_message_begin(self) -> Any:
        self._is_in_head, self._is_whole = True, False
        self._num_field_bytes = 0
        # The keep-alive timer stops only here. If empty lines before a request stopped it, they
        # would keep an idle connection open.
        self._unset_keepalive_if_required()
        return super().on_message_begin()

    def on_url(self, url: bytes) -> Any:
        self._count(len(url))
        return super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> Any:
        self._count(len(name) + len(value) + len(": \r\n"))
        if not self._is_in_head:
            return None  # trailers are ignored and never added to the headers
        return super().on_header(name, value)

    def on_headers_complete(self) -> Any:
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise GuardRefused
        if status := refusal(self.parser.get_http_version(), self.headers):
            self._status = HTTPStatus(status)
            raise GuardRefused
        scope = cast("dict[str, Any]", self.scope)  # ASGI allows keys of our own
        scope[CONNECTION] = self
        self.bounds.answers(self._ip, self.abort)
        super().on_headers_complete()
        self._is_in_head = False
        scope["path"] = scope["raw_path"].decode("ascii")  # not decoded: %2f is not a slash here
        # If the answer ends before the request has arrived, the connection ends as well.
        self._keeps_alive, self.cycle.keep_alive = self.cycle.keep_alive, False
        self.cycle.transport = cast("asyncio.Transport", _EarlyTransport(self))
        return None

    def on_body(self, body: bytes) -> Any:
        self._num_framing -= len(body)
        self._num_body += len(body)
        return super().on_body(body)

    def on_message_complete(self) -> Any:
        self._stop_clock()
        self._is_whole = True
        self._num_framing = self._num_field_bytes = self._num_body = 0
        self.cycle.transport = self.transport
        if not self.cycle.response_started and not self._is_stopping:
            self.cycle.keep_alive = self._keeps_alive
        return super().on_message_complete()

    def _should_upgrade(self) -> bool:
        """Refuse upgrades. uvicorn's own method would search all headers for each piece of body."""
        return False

    def _count(self, num_bytes: int) -> None:
        self._num_field_bytes += num_bytes
        if self._num_field_bytes > self.bounds.max_header_bytes:
            self._status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            raise GuardRefused

    def _start_clock(self) -> None:
        self._deadline = self.loop.call_later(
            self.bounds.receive_timeout_s, self._refuse, HTTPStatus.REQUEST_TIMEOUT
        )

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, status: HTTPStatus) -> None:
        self._stop_clock()
        if self.transport.is_closing() or self._is_ending:
            return
        if self._may_answer():
            head = (
                f"HTTP/1.1 {status} {status.phrase}\r\nconnection: close\r\ncontent-length: "
                "0\r\n\r\n"
            )
            self.transport.write(head.encode())
        self.end()

    def _may_answer(self) -> bool:
        """Whether the client would take an answer sent now as the answer to its current request."""
        # uvicorn sets `cycle` only at the first request.
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is None or cycle.response_complete:
            return True
        is_of_this = not self._is_whole and not self._is_in_head
        return is_of_this and not cycle.response_started and not self.pipeline

    def end(self) -> None:
        """Send the written bytes. Drop the connection when the client ends it, or after 2 s."""
        if self._is_ending or self.transport.is_closing():
            return
        self._is_ending = True
        if self._is_counted:
            self.bounds.waits(self._ip, self.abort)  # the connection stays only for its answer
        self._stop_clock()
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        with contextlib.suppress(OSError):  # the client is gone
            self.transport.write_eof()
        self._deadline = self.loop.call_later(_LINGER_S, self.abort)
        for cycle in (self.cycle, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.flow.resume_writing()
        self._go()

    def _go(self) -> None:
        self.is_gone = True
        on_gone, self._on_gone = self._on_gone, None
        if on_gone is not None:
            on_gone()

    def _leave(self) -> None:
        """Remove the connection from the listener's counts."""
        if self._is_counted:
            self._is_counted = False
            self.bounds.leave(self._ip, self.abort)


class _EarlyTransport:
    """The transport of an answer whose request is still arriving.

    Closing it ends the connection with `_Guarded.end`.
    """

    def __init__(self, guard: _Guarded) -> None:
        self._guard = guard

    def write(self, data: bytes) -> None:
        self._guard.transport.write(data)

    def is_closing(self) -> bool:
        return self._guard.transport.is_closing()

    def close(self) -> None:
        self._guard.end()
