"""One UCX endpoint as a `KvConnection`: what is posted on it, and what happens when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np

from pdmesh.kv.transport.base import KvBytes
from pdmesh.kv.transport.device_bytes import DeviceBytes
from pdmesh.kv.transport.ucx_endpoints import PairedEndpoint
from pdmesh.kv.transport.ucx_handshake import Address

PEER_GONE: Final = "the peer is gone"


class Owner(Protocol):
    """What a connection needs from its transport."""

    def post(self, post: Any, buffer: Any, tag: int) -> Any: ...

    def watch(self, request: Any, on_done: Callable[[bool], None], buffer: object) -> None: ...

    def add_message(
        self, connection: UcxConnection, parts: Sequence[bytes | memoryview]
    ) -> None: ...

    def send_frame(self, connection: UcxConnection, *more: bytes | memoryview) -> None: ...

    def close_soon(self, connection: UcxConnection) -> None: ...


class UcxConnection:
    """One endpoint. `number` is ours, `peer_number` the other side's; both make up tags."""

    def __init__(self, transport: Owner, endpoint: PairedEndpoint, key: int, number: int) -> None:
        self.key = key
        self.number = number
        self.peer_number = 0  # 0 until the peer's welcome
        self.there: Address | None = None  # where our hello went; None: the peer connected to us
        self.greeted: asyncio.Future[None] | None = None  # only of a connection that we opened
        self.endpoint: PairedEndpoint | None = endpoint  # None once it is closed
        self.is_announced = False
        self.close_reason = ""
        self.is_fenced = False  # we dropped it: later messages from it are ignored
        self.waiting: list[bytes] = []  # messages, each with its length, for the next frame
        self.num_waiting_bytes = 0
        self.num_unsent = 0  # frames on their way out
        self.payloads: list[Any] = []  # requests that may still touch a caller's bytes
        self._transport = transport
        endpoint.raw.set_close_callback(self._on_endpoint_closed)

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        if not self.close_reason:
            self._transport.add_message(self, parts)

    def send_payload(self, key: int, buffer: KvBytes, on_sent: Callable[[], None]) -> None:
        if not self.close_reason and self.endpoint is not None:
            self._transport.send_frame(self)  # this frame announces the payload
            self._post_payload(self.endpoint.raw.tag_send, self.peer_number, key, buffer, on_sent)

    def recv_payload(self, key: int, buffer: KvBytes, on_received: Callable[[], None]) -> None:
        if not self.close_reason and self.endpoint is not None:
            self._post_payload(self.endpoint.raw.tag_recv, self.number, key, buffer, on_received)

    def move_to(self, endpoint: PairedEndpoint) -> None:
        """Use another endpoint to the same peer. Nothing but the greeting was sent so far."""
        if self.endpoint is not None:
            self.endpoint.raw.remove_close_callback()
        self.endpoint = endpoint
        endpoint.raw.set_close_callback(self._on_endpoint_closed)

    def abort(self, reason: str) -> None:
        self.is_fenced = True
        self.lose(reason)

    def lose(self, reason: str) -> None:
        """The peer is gone; messages that have arrived already still count."""
        if not self.close_reason:
            self.close_reason = reason
            self._transport.close_soon(self)

    def _post_payload(
        self, post: Any, number: int, key: int, buffer: KvBytes, on_done: Callable[[], None]
    ) -> None:
        if isinstance(buffer, DeviceBytes):
            exposed = buffer.exposed
        else:  # a strided array would be sent as wrong bytes, silently
            exposed = buffer
            assert exposed.dtype == np.uint8
            assert exposed.ndim == 1
            assert exposed.flags.c_contiguous
        request = self._transport.post(post, exposed, _tag(number, key))
        if request is None:
            self.abort("the endpoint refused a payload")
            return
        self.payloads.append(request)

        def done(is_ok: bool) -> None:
            self.payloads = [r for r in self.payloads if r is not request]
            if is_ok and not self.close_reason:
                on_done()
            elif not is_ok:
                self.lose(PEER_GONE)

        self._transport.watch(request, done, buffer)

    def on_posted(self, is_ok: bool) -> None:
        """A frame or greeting left, or failed."""
        self.num_unsent -= 1
        if not is_ok:
            self.lose(PEER_GONE)

    def _on_endpoint_closed(self, *_: object) -> None:
        self.lose(PEER_GONE)


def _tag(number: int, key: int) -> int:
    """The lower half of a connection's number is unique at its receiver, and never 0."""
    return (number & 0xFFFFFFFF) << 32 | key & 0xFFFFFFFF
