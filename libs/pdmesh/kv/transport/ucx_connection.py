"""A `KvConnection` over one UCX endpoint: posts sends and receives, and ends the connection."""

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
    """The methods of the transport that its connections call."""

    def post(self, post: Any, buffer: Any, tag: int) -> Any: ...

    def watch(self, request: Any, on_done: Callable[[bool], None], buffer: object) -> None: ...

    def add_message(
        self, connection: UcxConnection, parts: Sequence[bytes | memoryview]
    ) -> None: ...

    def send_frame(self, connection: UcxConnection, *more: bytes | memoryview) -> None: ...

    def close_soon(self, connection: UcxConnection) -> None: ...


class UcxConnection:
    """The connection on one endpoint.

    Each side chooses a number for the connection. `number` is ours and `peer_number` is the peer's.
    The tag of a payload contains the receiver's number.
    """

    def __init__(self, transport: Owner, endpoint: PairedEndpoint, key: int, number: int) -> None:
        self.key = key
        self.number = number
        self.peer_number = 0  # 0 until the peer's welcome arrives
        # The address that our hello was sent to. None if the peer opened the connection.
        self.there: Address | None = None
        self.greeted: asyncio.Future[None] | None = None  # None if the peer opened the connection
        self.endpoint: PairedEndpoint | None = endpoint  # None once it is closed
        self.is_announced = False
        self.close_reason = ""
        self.is_fenced = False  # True after `abort`: later messages of the peer are ignored
        self.waiting: list[bytes] = []  # messages for the next frame, each with its length
        self.num_waiting_bytes = 0
        self.num_unsent = 0  # frames that are posted and not sent yet
        self.payloads: list[Any] = []  # requests that may still read or write a caller's bytes
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
        """Use another endpoint to the same peer. Only a hello may have been sent so far."""
        if self.endpoint is not None:
            self.endpoint.raw.remove_close_callback()
        self.endpoint = endpoint
        endpoint.raw.set_close_callback(self._on_endpoint_closed)

    def abort(self, reason: str) -> None:
        self.is_fenced = True
        self.lose(reason)

    def lose(self, reason: str) -> None:
        """End the connection because the peer is gone.

        Messages already received are still handled.
        """
        if not self.close_reason:
            self.close_reason = reason
            self._transport.close_soon(self)

    def _post_payload(
        self, post: Any, number: int, key: int, buffer: KvBytes, on_done: Callable[[], None]
    ) -> None:
        if isinstance(buffer, DeviceBytes):
            exposed = buffer.exposed
        else:  # UCX would send wrong bytes of a strided array, without an error
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
        """UCX has sent a frame, hello or welcome, or has failed to send it."""
        self.num_unsent -= 1
        if not is_ok:
            self.lose(PEER_GONE)

    def _on_endpoint_closed(self, *_: object) -> None:
        self.lose(PEER_GONE)


def _tag(number: int, key: int) -> int:
    """The tag of a payload, from the lower halves of the connection's number and the pull's key.

    The lower half of a connection number is unique in its process and never 0.
    """
    return (number & 0xFFFFFFFF) << 32 | key & 0xFFFFFFFF
