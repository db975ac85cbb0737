"""A gRPC channel over mutual TLS that uses the latest certificate for new calls.

gRPC fixes the certificate of a channel when the channel is made. SecureChannel wraps such a
channel, and replaces it when the certificate's files have changed. Calls on the old channel
continue. The old channel is closed when its last call has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import grpc

if TYPE_CHECKING:
    from pdmesh.net.tls.certificate_renewal import CertificateFolder, Certificates


Make = Callable[["Certificates"], grpc.aio.Channel]


class SecureChannel(grpc.aio.Channel):
    def __init__(self, folder: CertificateFolder, make: Make) -> None:
        self._folder, self._make = folder, make
        self._link = _Link(make, folder.latest())
        self._retired: set[_Link] = set()

    @property
    def num_replaced(self) -> int:
        """The number of replaced channels on which calls still run."""
        return len(self._retired)

    def _latest(self) -> _Link:
        certificates = self._folder.latest()
        if certificates is not self._link.certificates:
            old, self._link = self._link, _Link(self._make, certificates)
            self._retired.add(old)
            old.close_when_idle(self._retired.discard)
        return self._link

    # The types are Any because grpc-stubs has no asyncio types for the serializers that a stub
    # passes and for the callable that it gets.
    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return self._caller(lambda inner: inner.unary_unary(*args, **options))

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return self._caller(lambda inner: inner.unary_stream(*args, **options))

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return self._caller(lambda inner: inner.stream_unary(*args, **options))

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return self._caller(lambda inner: inner.stream_stream(*args, **options))

    def _caller(self, bind: Callable[[grpc.aio.Channel], Any]) -> Callable[..., Any]:
        link = self._link
        bound = bind(link.channel)

        def invoke(*args: Any, **options: Any) -> Any:
            nonlocal link, bound
            latest = self._latest()
            if latest is not link:
                link, bound = latest, bind(latest.channel)
            return link.watched(bound(*args, **options))

        return invoke

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close(None)

    async def close(self, grace: float | None = None) -> None:
        await asyncio.gather(*(each.close(grace) for each in (self._link, *self._retired)))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._latest().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._latest().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._latest().channel.channel_ready()


class _Link:
    """A wrapped channel, its certificate, and the number of calls that run on it."""

    def __init__(self, make: Make, certificates: Certificates) -> None:
        self.channel, self.certificates = make(certificates), certificates
        self._num_calls = 0
        self._on_closed: Callable[[_Link], None] | None = None
        self._closing: asyncio.Task[None] | None = None

    def watched(self, call: Any) -> Any:
        self._num_calls += 1
        call.add_done_callback(self._ended)
        return call

    def _ended(self, _: object) -> None:
        self._num_calls -= 1
        self._close_if_idle()

    def close_when_idle(self, on_closed: Callable[[_Link], None]) -> None:
        self._on_closed = on_closed
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._on_closed is not None and not self._num_calls and self._closing is None:
            self._closing = asyncio.ensure_future(self.close(None))

    async def close(self, grace: float | None) -> None:
        await self.channel.close(grace)
        if self._on_closed is not None:
            self._on_closed(self)
