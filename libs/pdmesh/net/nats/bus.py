"""Sends and receives events over NATS. Notices a dead or frozen server within seconds.

With nats-py's defaults this would take minutes. The bus sends messages to itself, and
`server_liveness` decides from their arrival whether the server answers. Events that are published
while the server is unreachable are dropped and counted, because late events would only mislead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import BadSubjectError, SlowConsumerError
from nats.errors import Error as NatsError

from pdmesh.config import without_password
from pdmesh.core.server_urls import server_urls
from pdmesh.errors import BadCertificates, InvalidRequest, Unavailable
from pdmesh.net import tasks
from pdmesh.net.bus import Handler, Message
from pdmesh.net.nats.buckets import IMPORTED_API, MAKER, inbox_of
from pdmesh.net.nats.server_liveness import ECHO_EVERY_S, ServerLiveness, ServerNews
from pdmesh.net.nats.tls_client import TlsClient
from pdmesh.net.tls.own_certificate import own_certificates, role_at_nats
from pdmesh.telemetry import metrics, names

if TYPE_CHECKING:
    from pdmesh.net.tls.certificate_renewal import Certificates

log = structlog.get_logger(__name__)

MIN_SERVER: Final = (2, 11)  # the first version with per-key expiry markers
_MAX_PENDING_BYTES: Final = 4 * 1024 * 1024  # of events that are not sent yet
_MAX_QUEUED_EVENTS: Final = 65_536  # unhandled events per subscription
_MAX_QUEUED_BYTES: Final = 32 * 1024 * 1024
_COMPLAIN_EVERY_S: Final = 5.0
_CLIENT_TASKS: Final = (
    "_reconnection_task", "_reading_task", "_ping_interval_task", "_flusher_task",
)  # fmt: skip

_dropped = metrics.counter(names.BUS_DROPPED, "Events not sent or not handled, by reason")
_reconnects = metrics.counter(names.BUS_RECONNECTS, "How often the connection to NATS was restored")


class NatsSubscription:
    """A subscription to the subjects of one pattern.

    An exception of the handler is logged, and the next event is still handled.
    """

    def __init__(self, pattern: str, handler: Handler, on_gap: Callable[[], None] | None) -> None:
        self.pattern = pattern
        self._handler = handler
        self._on_gap = on_gap
        self.inner: Any = None  # nats-py's subscription, which is untyped

    async def deliver(self, msg: Msg) -> None:
        try:
            await self._handler(Message(msg.subject, msg.data, msg.headers or {}))
        except Exception:
            log.exception("bus.handler_failed", pattern=self.pattern)

    def gap(self) -> None:
        if self._on_gap is not None:
            self._on_gap()

    async def unsubscribe(self) -> None:
        with contextlib.suppress(NatsError):
            await self.inner.unsubscribe()


class NatsBus:
    """Implements `Bus`. Make one per process with `connect`."""

    def __init__(self, url: str, num_replicas: int | None = None) -> None:
        self._url, self._servers = url, server_urls(url)
        self.num_replicas = num_replicas  # of buckets that this process makes; None means unknown
        self._is_encrypted = url.startswith("tls://")
        # The type is Any because nats-py is untyped.
        self._client: Any = TlsClient() if self._is_encrypted else Client()
        self._certificates = own_certificates()
        self._role = role_at_nats()
        self._shown: Certificates | None = None  # the certificates in the client's TLS context
        self._subscriptions: list[NatsSubscription] = []
        self._on_lost: list[Callable[[], None]] = []
        self._on_restored: list[Callable[[], None]] = []
        self._server = ServerLiveness()
        self._complained_at = float("-inf")
        self._echo_task: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, url: str, name: str, num_replicas: int | None = None) -> NatsBus:
        """Connect to the server, or to one of several servers. Waits until a server answers.

        Raises Unavailable if the server is too old, and BadCertificates if TLS cannot be used.
        """
        bus = cls(url, num_replicas)
        await bus._client.connect(
            bus._servers,
            dont_randomize=True,  # the address lists the nearest server first
            **bus._tls_options(),
            **bus._role_options(),
            name=name,
            connect_timeout=1,
            reconnect_time_wait=0.1,
            max_reconnect_attempts=-1,
            ping_interval=2,
            max_outstanding_pings=1,
            pending_size=0,  # nothing is buffered while disconnected
            error_cb=bus._on_error,
            disconnected_cb=bus._on_disconnected,
            reconnected_cb=bus._on_reconnected,
        )
        version = bus._client.connected_server_version
        if (version.major, version.minor) < MIN_SERVER:
            await bus._client.close()
            raise Unavailable(
                f"NATS at {without_password(url)} is {version}; at least 2.11 is needed"
            )
        await bus._start_echo()
        log.info("bus.connected", url=without_password(url))
        return bus

    def _tls_options(self) -> dict[str, object]:
        """Raises BadCertificates."""
        if not self._is_encrypted:
            return {}
        logging.getLogger("asyncio").addFilter(_is_not_about_eof)
        try:
            context = self._new_context()
        except OSError as exc:
            raise BadCertificates(f"certificates for NATS: {exc}") from exc
        return {"tls": context, "tls_handshake_first": True}

    def _role_options(self) -> dict[str, object]:
        if self._role is None:
            return {}
        return {"inbox_prefix": inbox_of(self._role.role, self._role.instance_id)}

    def _new_context(self) -> ssl.SSLContext:
        """Raises OSError."""
        from pdmesh.net.tls.contexts import client_context

        if self._certificates is not None:
            self._shown = self._certificates.latest()
        return client_context(self._certificates)

    def _renew_certificate(self) -> None:
        """Use the latest certificate for later connections."""
        tls = self._client.options.get("tls")
        if tls is None or self._certificates is None:
            return
        if self._certificates.latest() is not self._shown:
            try:
                self._client.options["tls"] = self._new_context()
            except OSError as exc:  # the files are being replaced; the next call reads them again
                self._shown = None
                self._complain("bus.certificate_not_renewed", error=str(exc))

    @property
    def client(self) -> Any:
        """The nats-py client, for JetStream.

        Do not call its `flush`: a timeout in `flush` ends the client's read loop.
        """
        return self._client

    def jetstream(self, timeout_s: float) -> Any:
        """nats-py's JetStream, with the API prefix that this process may use."""
        prefix = {} if self._role is None else {"prefix": IMPORTED_API}
        return self._client.jetstream(timeout=timeout_s, **prefix)

    @property
    def makes_buckets(self) -> bool:
        """Whether this process may make buckets.

        If NATS has permissions by role, only masters may. Otherwise every process may.
        """
        return self._role is None or self._role.role == MAKER

    @property
    def has_roles(self) -> bool:
        return self._role is not None

    @property
    def is_connected(self) -> bool:
        """Whether the server answers. An open socket is not enough."""
        return bool(self._client.is_connected and self._server.answers(time.monotonic()))

    @property
    def stable_since(self) -> float:
        """The monotonic time since which the server has always answered. Valid while connected."""
        return self._server.stable_since

    def on_lost(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` when the server stops answering. Returns a function that unsubscribes."""
        self._on_lost.append(callback)
        return lambda: _discard(self._on_lost, callback)

    def on_restored(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` when the server answers again. Returns a function that unsubscribes."""
        self._on_restored.append(callback)
        return lambda: _discard(self._on_restored, callback)

    async def publish(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        if not self._client.is_connected:
            _dropped.add(1, {names.ATTR_REASON: "disconnected"})
            return
        if self._client.pending_data_size > _MAX_PENDING_BYTES:
            _dropped.add(1, {names.ATTR_REASON: "backlog"})
            return
        try:
            await self._client.publish(subject, data, headers=dict(headers) if headers else None)
        except NatsError as exc:
            _dropped.add(1, {names.ATTR_REASON: "refused"})
            self._complain("bus.publish_refused", error=type(exc).__name__)

    async def subscribe(
        self, pattern: str, handler: Handler, *, on_gap: Callable[[], None] | None = None
    ) -> NatsSubscription:
        subscription = NatsSubscription(pattern, handler, on_gap)
        try:
            subscription.inner = await self._client.subscribe(
                pattern,
                cb=subscription.deliver,
                pending_msgs_limit=_MAX_QUEUED_EVENTS,
                pending_bytes_limit=_MAX_QUEUED_BYTES,
            )
        except BadSubjectError as exc:
            raise InvalidRequest(f"{pattern!r} is not a NATS subject", field="pattern") from exc
        except NatsError as exc:
            raise Unavailable(f"cannot subscribe to {pattern}: the bus is closed") from exc
        self._subscriptions.append(subscription)
        return subscription

    async def close(self) -> None:
        if self._echo_task is not None:
            self._echo_task.cancel()
        self._server.end()
        # RuntimeError: uvloop raises it for a write to a broken connection.
        with contextlib.suppress(NatsError, OSError, TimeoutError, RuntimeError):
            async with asyncio.timeout(1.0):  # time for the last events to be sent
                await self._close_client()
        # nats-py cancels each of its tasks once. A reconnection task that loses this cancellation
        # continues forever, and the event loop cannot end before the task does.
        current = asyncio.current_task()
        left = (getattr(self._client, name) for name in _CLIENT_TASKS)
        await tasks.end(task for task in left if task is not None and task is not current)

    async def _close_client(self) -> None:
        try:
            await self._client.close()
        except asyncio.CancelledError:
            # Some tasks of nats-py wait for the end of the same socket. A cancellation of one of
            # these tasks also cancels the other waits, such as the one here.
            if (current := asyncio.current_task()) is None or current.cancelling():
                raise

    async def _start_echo(self) -> None:
        inbox = self._client.new_inbox()
        self._server.begin(time.monotonic())

        async def on_echo(_: Msg) -> None:
            self._tell(self._server.echo(time.monotonic()))

        await self._client.subscribe(inbox, cb=on_echo)
        self._echo_task = asyncio.create_task(self._echo(inbox), name="bus-echo")

    async def _echo(self, inbox: str) -> None:
        while True:
            self._renew_certificate()
            if self._client.is_connected:
                with contextlib.suppress(NatsError, OSError):
                    await self._client.publish(inbox, b"")
            await asyncio.sleep(ECHO_EVERY_S)
            self._tell(self._server.look(time.monotonic()))

    def _tell(self, news: Iterable[ServerNews]) -> None:
        for each in news:
            match each:
                case ServerNews.LOST:
                    log.warning("bus.lost", url=without_password(self._url))
                    callbacks = self._on_lost
                case ServerNews.RESTORED:
                    _reconnects.add(1)
                    log.info("bus.restored", url=without_password(self._url))
                    callbacks = self._on_restored
                case ServerNews.STILL_LOST:
                    self._try_the_next()
                    continue
            for callback in tuple(callbacks):
                callback()

    def _try_the_next(self) -> None:
        """End the connection to a silent server if there are other servers.

        nats-py itself would wait for its pings, and then for the end of the connection. With TLS,
        this takes half a minute.
        """
        writer = getattr(self._client._transport, "_io_writer", None)
        if len(self._servers) > 1 and self._client.is_connected and writer is not None:
            writer.transport.abort()

    async def _on_disconnected(self) -> None:
        self._tell(self._server.disconnected())

    async def _on_reconnected(self) -> None:
        """Report a gap to every subscription, because events may have been lost."""
        self._subscriptions = [s for s in self._subscriptions if not s.inner._closed]
        for subscription in self._subscriptions:
            subscription.gap()
        self._tell(self._server.echo(time.monotonic()))

    async def _on_error(self, exc: Exception) -> None:
        self._renew_certificate()
        if isinstance(exc, SlowConsumerError):
            _dropped.add(1, {names.ATTR_REASON: "slow_consumer"})
            for subscription in self._subscriptions:
                if subscription.inner is exc.sub:
                    subscription.gap()
            self._complain("bus.slow_consumer", subject=exc.subject)
        elif not self._client.is_connected:
            self._complain("bus.unreachable", url=without_password(self._url), error=str(exc))
        else:
            self._complain("bus.error", error=str(exc))

    def _complain(self, event: str, **data: object) -> None:
        """Log at most one line every few seconds, because an outage causes ten errors a second."""
        now = time.monotonic()
        if now - self._complained_at >= _COMPLAIN_EVERY_S:
            self._complained_at = now
            log.warning(event, **data)


def _is_not_about_eof(record: logging.LogRecord) -> bool:
    """False for the warning that asyncio logs at the end of each TLS connection of nats-py."""
    return not str(record.msg).startswith("returning true from eof_received()")


def _discard(callbacks: list[Callable[[], None]], callback: Callable[[], None]) -> None:
    if callback in callbacks:
        callbacks.remove(callback)
