"""uvicorn's protocol with the bounds it lacks: how many connections, how large a head, and how long it may take (F29).

Without them an idle or trickling connection stays for ever, a head of any size is read, and one address takes every
file descriptor. Streams of any length are not affected: the clock stops when the request has arrived whole.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

CONNECTION: Final = "pdmesh.connection"  # in the scope: tells when the client goes, without a task that waits for it
_TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_SLOW: Final = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


# Requests sent before their predecessors were answered. Nobody needs them, and a buffer full holds thousands.
_MAX_PIPELINED: Final = 16


class TooManyPipelined(Exception):
    """Not for anyone to catch but the parser."""


@dataclass(slots=True)
class Bounds:
    """One listener's bounds, and how many connections each address has open now."""

    max_header_bytes: int
    receive_timeout_s: float
    max_connections: int
    max_connections_per_ip: int
    num_by_ip: Counter[str] = field(default_factory=Counter)
    num_open: int = 0
    num_refused: int = 0

    def enter(self, ip: str) -> bool:
        if self.num_open >= self.max_connections or (
            self.num_by_ip[ip] >= self.max_connections_per_ip
        ):
            self.num_refused += 1
            return False
        self.num_open += 1
        self.num_by_ip[ip] += 1
        return True

    def leave(self, ip: str) -> None:
        self.num_open -= 1
        self.num_by_ip[ip] -= 1
        if not self.num_by_ip[ip]:
            del self.num_by_ip[ip]


def guarded(within: Bounds) -> Callable[..., HttpToolsProtocol]:
    """The protocol class with these bounds, as uvicorn's `http` setting takes it."""

    class Guarded(_Guarded):
        bounds = within

    return Guarded


class _Guarded(HttpToolsProtocol):
    bounds: Bounds
    _ip: str | None = None  # counted under it, once admitted
    _head_bytes = 0
    _is_in_head = True
    _deadline: asyncio.TimerHandle | None = None
    is_gone = False
    _on_gone: Callable[[], None] | None = None  # for the answer being written now

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        ip = str((transport.get_extra_info("peername") or ("",))[0])
        if not self.bounds.enter(ip):
            cast("asyncio.Transport", transport).abort()
            return
        self._ip = ip
        super().connection_made(cast("asyncio.Transport", transport))
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ip is None:
            return
        self.bounds.leave(self._ip)
        self._stop_clock()
        self.is_gone = True
        super().connection_lost(exc)
        if self._on_gone is not None:
            self._on_gone()

    def data_received(self, data: bytes) -> None:
        if self._ip is None:
            return
        if self._is_in_head:
            self._head_bytes += len(data)
            has_end = b"\r\n\r\n" in data
            if self._head_bytes > self.bounds.max_header_bytes and not (
                has_end and data.index(b"\r\n\r\n") < self.bounds.max_header_bytes
            ):
                self._refuse(_TOO_LARGE)
                return
        super().data_received(data)
        if self._head_bytes and self._deadline is None:  # a request has begun, and not ended
            self._start_clock()

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Call `on_gone` once the client has gone (closing its sending half counts), until `unwatch`."""
        self.flow.resume_reading()  # a large body stops it, and then nobody would notice
        if self.is_gone:
            on_gone()
        else:
            self._on_gone = on_gone

    def unwatch(self) -> None:
        self._on_gone = None

    def abort(self) -> None:
        """Drop it with what the client has not read; an orderly close would wait for the client to read that."""
        self.transport.abort()

    # Called by httptools, hence not typed upstream.
    def on_headers_complete(self) -> Any:
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise TooManyPipelined  # ends the parser, and uvicorn the connection
        self._is_in_head = False
        scope = cast("dict[str, Any]", self.scope)  # ASGI allows keys of our own
        scope[CONNECTION] = self
        return super().on_headers_complete()

    def on_message_complete(self) -> Any:
        self._stop_clock()
        self._is_in_head, self._head_bytes = True, 0
        return super().on_message_complete()

    def _start_clock(self) -> None:
        self._deadline = self.loop.call_later(
            self.bounds.receive_timeout_s, self._refuse, _TOO_SLOW
        )

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, answer: bytes) -> None:
        self._stop_clock()
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(answer)
        self.transport.close()
