"""`KvTransport` over UCX through ucxx: RDMA and cuda_ipc on a cluster, tcp and shm on a laptop.

All connections share one posted receive for messages, so that the cost of a wake-up does not grow
with the number of peers. Messages travel in frames. A frame contains all messages to one peer from
one turn of the event loop, because a send and its completion cost more than moving a small prompt's
bytes. A frame names its connection by a random number that only the two ends know. Payloads are
received in place, by a tag made of the connection number and the pull's key.

There is no listener. To connect, a peer sends a hello to the address of the UCX worker
(`ucx_handshake`). The successive transports of a process share one worker and its handshake key
(`ucx_worker`). Each transport has a random life number, which is part of its address. A hello that
names the life of an earlier transport makes no connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from pdmesh.errors import KvTransferFailed
from pdmesh.kv.transport.base import MAX_MESSAGE, ConnectionHandler, KvConnection
from pdmesh.kv.transport.ucx_connection import PEER_GONE, UcxConnection
from pdmesh.kv.transport.ucx_endpoints import PairedEndpoint, close_endpoint
from pdmesh.kv.transport.ucx_handshake import (
    HANDSHAKE,
    Address,
    Hello,
    Welcome,
    pack_hello,
    pack_welcome,
    parse_address,
    read_hello,
    read_welcome,
)
from pdmesh.kv.transport.ucx_worker import (
    FRAME,
    LENGTH,
    MESSAGE_TAG,
    UcxWorker,
    give_worker_back,
    is_local,
    options_for,
    take_worker,
)

log = structlog.get_logger(__name__)

_MAX_FRAME = LENGTH.size + MAX_MESSAGE  # without the frame's header
_AT_ONCE = 32 << 10  # a message of at least this size is sent immediately, without an extra copy
MAX_CONNECTIONS = 4096  # at this number, incoming and outgoing ones together, peers are turned away
_FLUSH_S = 0.2  # time to send the last messages, mostly acks
_DRAIN_S = 2.0
_MAX_OPENINGS = 8  # attempts to connect, if UCX ends the connection before the peer's welcome
_WARM_UP_S = 1.0


class _LostInGreeting(KvTransferFailed):
    """UCX ended the connection before the peer's welcome arrived.

    The peer may be gone. Or it closed its endpoint of this pair long ago, after an earlier hello
    that this side gave up, and UCX's keepalive notices that only now (`ucx_endpoints`).
    """


class UcxTransport:
    """A transport that runs on the event loop that called `start`, asyncio's or uvloop's."""

    def __init__(self, host: str = "127.0.0.1", *, reaches_gpu: bool = False) -> None:
        """If `host` is a loopback address, UCX uses only the loopback device.

        Otherwise UCX uses the devices that `UCX_NET_DEVICES` names, or all devices. `reaches_gpu`
        allows payloads in a GPU's memory.
        """
        self._options = options_for(host, reaches_gpu=reaches_gpu)
        self._is_local = is_local(host)
        self._handler: ConnectionHandler | None = None
        self._ucx: UcxWorker | None = None
        self._life = secrets.randbits(64)
        self._is_closing = False
        self._by_number: dict[int, UcxConnection] = {}
        # Connections that wait for a welcome, by peer address and turn of our hello
        # (`ucx_endpoints`).
        self._greeting: dict[tuple[bytes, int], UcxConnection] = {}
        self._talking: dict[UcxConnection, None] = {}  # connections with unsent messages
        self._emptied = asyncio.Event()  # set when no connection is left
        self._dying: list[UcxConnection] = []  # connections whose endpoints are to be closed
        # Connections whose endpoints are closed and whose requests have not ended yet.
        self._draining: list[UcxConnection] = []

    @property
    def num_connections(self) -> int:
        return len(self._by_number)

    async def start(self, handler: ConnectionHandler) -> str:
        try:
            ucx = self._ucx = take_worker(self._options, FRAME.size + _MAX_FRAME)
        except Exception as exc:  # ucxx has a class per UCX status
            raise KvTransferFailed(f"UCX does not start: {exc}", reason="KV_NO_TRANSPORT") from exc
        self._array, self._tag = ucx.array, ucx.tag
        self._ucx_error: type[Exception] = ucx.api.UCXError
        self._handler = _NoHandler()
        ucx.begin(self._on_progressed)
        if not ucx.is_warm:
            await self._warm_up(ucx)
        self._handler = handler
        if not self._is_local and not ucx.has_fabric():
            log.warning(
                "kv.no_rdma", hint="this UCX has no verbs; KV goes over tcp or shared memory"
            )
        return self._address()

    def _address(self) -> str:
        assert self._ucx is not None
        return str(Address(self._ucx.address, self._ucx.key, self._life))

    async def _warm_up(self, ucx: UcxWorker) -> None:
        """Connect to this worker itself, so that no request pays for its first connection."""
        try:
            connection = await self.connect(self._address(), _WARM_UP_S)
        except KvTransferFailed as error:
            log.info("kv.not_warm", error=error.message)
            return
        ucx.is_warm = True
        connection.abort("warm")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WARM_UP_S):
                await self._emptied.wait()

    async def connect(self, address: str, timeout_s: float) -> KvConnection:
        loop = asyncio.get_running_loop()
        ends = loop.time() + timeout_s
        for _ in range(_MAX_OPENINGS - 1):
            with contextlib.suppress(_LostInGreeting):
                return await self._open(address, ends - loop.time())
        return await self._open(address, ends - loop.time())

    async def _open(self, address: str, timeout_s: float) -> KvConnection:
        assert self._ucx is not None, "start() comes first"
        connection: UcxConnection | None = None
        try:
            async with asyncio.timeout(timeout_s):
                there = parse_address(address)
                endpoint = self._ucx.endpoints.next(there.worker)
                connection = self._add(endpoint)
                connection.greeted = asyncio.get_running_loop().create_future()
                connection.there = there
                self._greeting[there.worker, endpoint.turn] = connection
                try:
                    self._say_hello(connection, there, endpoint)
                    await connection.greeted
                finally:
                    del self._greeting[there.worker, endpoint.turn]
                if connection.close_reason:
                    # The handler gets no `on_closed`, because it never got this connection.
                    raise ConnectionError(connection.close_reason)
                connection.is_announced = True
        except BaseException as exc:
            failure: type[KvTransferFailed] = KvTransferFailed
            if connection is not None:
                if connection.close_reason == PEER_GONE:
                    failure = _LostInGreeting
                if connection.greeted is not None:
                    connection.greeted.cancel()  # the caller no longer waits for the welcome
                connection.abort("not connected")
            if not isinstance(exc, (OSError, ValueError, self._ucx_error)):
                raise  # TimeoutError is an OSError
            reason = str(exc) or "timed out"
            raise failure(f"no KV connection: {reason}", reason="KV_CONNECT_FAILED") from exc
        return connection

    async def close(self) -> None:
        ucx = self._ucx
        if ucx is None or self._is_closing:
            return
        self._is_closing = True  # from now on, new peers are turned away
        self._send_waiting()
        ucx.drain(lambda: not any(c.num_unsent for c in self._by_number.values()), _FLUSH_S)
        for connection in list(self._by_number.values()):
            connection.abort("closing")
        ucx.drain(lambda: not self._by_number and not ucx.num_pending, _DRAIN_S)
        give_worker_back(ucx, is_quiet=not self._by_number and not ucx.num_pending)
        self._ucx = None
        for connection in self._draining:
            # Only this worker could touch the payloads' buffers, and it is never used again.
            connection.payloads.clear()
        self._close_dying()

    # -- for connections --------------------------------------------------------------------------

    def post(self, post: Any, buffer: Any, tag: int) -> Any:
        """Post a tagged send or receive. Returns None if the endpoint refuses it."""
        try:
            return post(self._array(buffer), self._tag(tag))
        except self._ucx_error:
            return None

    def watch(self, request: Any, on_done: Callable[[bool], None], buffer: object) -> None:
        if self._ucx is not None:
            self._ucx.watch(request, on_done, buffer)

    def add_message(self, connection: UcxConnection, parts: Sequence[bytes | memoryview]) -> None:
        """Add the message to the peer's next frame, which is sent in this turn of the loop.

        A large message is sent immediately.
        """
        size = sum(len(part) for part in parts)
        assert 0 < size <= MAX_MESSAGE
        length = LENGTH.pack(size)
        if connection.num_waiting_bytes + LENGTH.size + size > _MAX_FRAME:
            self.send_frame(connection)
        if size >= _AT_ONCE:
            self.send_frame(connection, length, *parts)
            return
        connection.waiting.append(b"".join((length, *parts)))
        connection.num_waiting_bytes += LENGTH.size + size
        self._talking[connection] = None
        if self._ucx is not None:
            self._ucx.kick()

    def _send_waiting(self) -> bool:
        talking, self._talking = self._talking, {}
        for connection in talking:
            self.send_frame(connection)
        return bool(talking)

    def send_frame(self, connection: UcxConnection, *more: bytes | memoryview) -> None:
        """Send the waiting messages, followed by `more`, as one frame."""
        body, connection.waiting, connection.num_waiting_bytes = connection.waiting, [], 0
        if connection.endpoint is None or not (body or more):
            return
        size = sum(map(len, body)) + sum(map(len, more))
        frame = b"".join((FRAME.pack(connection.peer_number, size), *body, *more))
        request = self.post(connection.endpoint.raw.tag_send, frame, MESSAGE_TAG)
        if request is None:
            connection.abort("the endpoint refused a message")
        elif request.completed:
            if self._ucx is not None:
                self._ucx.kick()
        else:
            connection.num_unsent += 1
            self.watch(request, connection.on_posted, frame)

    def close_soon(self, connection: UcxConnection) -> None:
        """Close the endpoint later, because UCX allows no closing within its callbacks."""
        _settle(connection.greeted, connection.close_reason)
        self._dying.append(connection)
        if self._ucx is not None:
            self._ucx.kick()

    # -- called by the worker ---------------------------------------------------------------------

    def _on_progressed(self) -> bool:
        assert self._ucx is not None
        has_work = self._ucx.read_inbox(self._on_frame)
        has_work = self._close_dying() or has_work
        return self._send_waiting() or has_work

    def _on_frame(self, view: memoryview) -> None:
        assert self._ucx is not None
        number, size = FRAME.unpack_from(view)
        if size > _MAX_FRAME:
            return  # the frame is from a stranger
        at, end = FRAME.size, FRAME.size + size
        if number == HANDSHAKE:
            self._on_hello(bytes(view[at:end]))
            return
        connection = self._by_number.get(number)
        if connection is None:
            self._ucx.on_late(number, view[at:end])
            return
        if size == 0:
            if not connection.is_fenced:
                connection.lose("the peer said goodbye")
            return
        # Read a welcome even if the connection was aborted: a goodbye needs the peer's number.
        while at + LENGTH.size <= end and not (connection.is_fenced and connection.peer_number):
            (length,) = LENGTH.unpack_from(view, at)
            at += LENGTH.size
            if not 0 < length <= end - at:
                connection.abort("not a frame")
                return
            self._on_message(connection, view[at : at + length])
            at += length

    def _on_message(self, connection: UcxConnection, message: memoryview) -> None:
        if connection.peer_number:
            assert self._handler is not None
            self._handler.on_message(connection, message)
        else:
            self._on_welcome(connection, message)

    # -- the handshake ----------------------------------------------------------------------------

    def _add(self, endpoint: PairedEndpoint) -> UcxConnection:
        assert self._ucx is not None
        key = self._ucx.next_key()
        connection = UcxConnection(self, endpoint, key, secrets.randbits(32) << 32 | key)
        self._by_number[connection.number] = connection
        return connection

    def _say_hello(self, connection: UcxConnection, there: Address, on: PairedEndpoint) -> None:
        assert self._ucx is not None
        own = Hello(there.life, connection.number, on.turn, self._ucx.address)
        hello = pack_hello(own, there.key)
        frame = FRAME.pack(HANDSHAKE, len(hello)) + hello
        request = self.post(on.raw.tag_send, frame, MESSAGE_TAG)
        if request is None:
            raise ConnectionError("the endpoint refused a message")
        connection.num_unsent += 1
        self.watch(request, connection.on_posted, frame)

    def _on_hello(self, data: bytes) -> None:
        """Accept a peer whose hello was made with our key.

        The peer gets a goodbye instead if its hello names another life, if there are too many
        connections, or if this transport is closing.
        """
        assert self._ucx is not None
        ucx = self._ucx
        hello = read_hello(data, ucx.key)
        if hello is None:
            return
        is_full = len(self._by_number) >= MAX_CONNECTIONS
        if is_full:
            log.warning("kv.connections.full", num_connections=len(self._by_number))
        if is_full or self._is_closing or hello.life != self._life:
            ucx.turn_away(hello)
            return
        try:
            endpoint = self._endpoint_for(hello, ucx)
            connection = self._add(endpoint)
        except (self._ucx_error, RuntimeError):
            return  # the peer is gone, or uses a device that this machine lacks
        connection.peer_number = hello.number
        connection.is_announced = True
        own = Welcome(connection.number, endpoint.turn)
        connection.send([pack_welcome(hello.number, own, ucx.key)])
        assert self._handler is not None
        self._handler.on_connected(connection)

    def _endpoint_for(self, hello: Hello, ucx: UcxWorker) -> PairedEndpoint:
        """The endpoint to answer a hello on.

        Our own hello to the same peer may have crossed the peer's hello. Then both hellos used the
        same pair of endpoints. In this case, the side with the lower address answers on this pair,
        and moves the connection that it is opening to the next pair.
        """
        crossed = self._greeting.get((hello.worker, hello.turn))
        if crossed is None or crossed.endpoint is None or not ucx.address < hello.worker:
            return ucx.endpoints.answering(hello.worker, hello.turn)
        endpoint = crossed.endpoint
        if crossed.close_reason or crossed.peer_number or endpoint.turn != hello.turn:
            return ucx.endpoints.answering(hello.worker, hello.turn)
        crossed.move_to(ucx.endpoints.next(hello.worker))
        return endpoint

    def _on_welcome(self, connection: UcxConnection, message: memoryview) -> None:
        assert connection.there is not None, "a peer that connected to us has a number"
        assert self._ucx is not None
        there, endpoint = connection.there, connection.endpoint
        welcome = read_welcome(bytes(message), connection.number, there.key)
        if welcome is None:
            connection.abort("no welcome")
            return
        connection.peer_number = welcome.number
        if endpoint is not None and not connection.close_reason:
            try:
                found = self._ucx.endpoints.follow(there.worker, endpoint, welcome.turn)
                if found is not endpoint:
                    connection.move_to(found)
            except (self._ucx_error, RuntimeError):
                connection.lose(PEER_GONE)
                return
        _settle(connection.greeted, "")

    # -- the end ----------------------------------------------------------------------------------

    def _close_dying(self) -> bool:
        """Close the endpoints of dying connections.

        Report the end of a connection to the handler once UCX has released the buffers.
        """
        has_work = bool(self._dying)
        while self._dying:
            connection = self._dying.pop()
            self.send_frame(connection)
            self._say_goodbye(connection, self._ucx)
            endpoint, connection.endpoint = connection.endpoint, None
            if endpoint is not None:
                close_endpoint(endpoint.raw)
            self._draining.append(connection)
        if self._ucx is not None and any(c.payloads for c in self._draining):
            # An endpoint that ended by itself may have posted receives. ucxx marks these receives
            # and cancels them in its own progress loop, which does not run here. Without this call,
            # an unmatched receive never ends, and its connection never ends.
            self._ucx.worker.cancel_inflight_requests()
        for connection in [c for c in self._draining if not c.payloads]:
            self._draining.remove(connection)
            del self._by_number[connection.number]
            if not self._by_number:
                self._emptied.set()
            if connection.is_announced and self._handler is not None:
                self._handler.on_closed(connection, connection.close_reason)
        return has_work

    def _say_goodbye(self, connection: UcxConnection, ucx: UcxWorker | None) -> None:
        """Try to tell the peer that the connection ends.

        While both processes live, UCX does not tell the peer.
        """
        if ucx is None:
            return
        if connection.peer_number and connection.endpoint is not None:
            frame = FRAME.pack(connection.peer_number, 0)
            self.post(connection.endpoint.raw.tag_send, frame, MESSAGE_TAG)
        elif connection.there is not None:
            ucx.give_up(connection.number, connection.there)


class _NoHandler:
    """The handler during the warm-up."""

    def on_connected(self, connection: KvConnection) -> None: ...
    def on_message(self, connection: KvConnection, message: memoryview) -> None: ...
    def on_closed(self, connection: KvConnection, reason: str) -> None: ...


def _settle(future: asyncio.Future[None] | None, refusal: str) -> None:
    if future is None or future.done():
        return
    if refusal:
        future.set_exception(ConnectionError(refusal))
    else:
        future.set_result(None)
