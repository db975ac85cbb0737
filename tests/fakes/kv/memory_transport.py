"""A `KvTransport` between agents of one process, with the promises of the UCX adapter.

Messages and payloads are delivered from the event loop, in order within each lane. A frozen
transport delivers and accepts nothing, like a process after SIGSTOP. A cut transport has closed its
connections, like a process after SIGKILL.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from pdmesh.errors import KvTransferFailed
from pdmesh.kv.transport.base import (
    MAX_MESSAGE,
    ConnectionHandler,
    KvBytes,
    KvConnection,
)
from pdmesh.kv.transport.device_bytes import DeviceBytes
from pdmesh.kv.transport.memory_access import fill, host_view

_ports = itertools.count(1)
_listening: dict[str, MemoryTransport] = {}


class MemoryConnection:
    """One end of a connection. `other` is the peer's end."""

    def __init__(self, transport: MemoryTransport, key: int) -> None:
        self.transport = transport
        self.key = key
        self.other: MemoryConnection | None = None
        self.is_closed = False
        self.messages: deque[bytes] = deque()
        self.sends: dict[int, deque[tuple[KvBytes, Callable[[], None]]]] = defaultdict(deque)
        self.receives: dict[int, deque[tuple[KvBytes, Callable[[], None]]]] = defaultdict(deque)

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        if self.is_closed or self.other is None:
            return
        message = self.transport.tamper(b"".join(parts))
        assert 0 < len(message) <= MAX_MESSAGE
        self.other.messages.append(message)
        self.other.transport.wake()

    def send_payload(self, key: int, buffer: KvBytes, on_sent: Callable[[], None]) -> None:
        assert isinstance(buffer, DeviceBytes) or buffer.flags.c_contiguous
        if not self.is_closed:
            self.sends[key].append((buffer, on_sent))
            self._wake_both()

    def recv_payload(self, key: int, buffer: KvBytes, on_received: Callable[[], None]) -> None:
        assert isinstance(buffer, DeviceBytes) or buffer.flags.c_contiguous
        if not self.is_closed:
            self.receives[key].append((buffer, on_received))
            self._wake_both()

    def abort(self, reason: str) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self.transport.loop.call_soon(self.transport.closed, self, reason)
        if self.other is not None and not self.other.transport.is_frozen:
            self.other.abort("the peer is gone")

    def deliver(self) -> None:
        """Deliver everything that is deliverable now, messages first."""
        while self.messages and not self.is_closed:
            self.transport.handler_of(self).on_message(self, memoryview(self.messages.popleft()))
        if self.is_closed or self.other is None or self.other.is_closed:
            return
        if self.other.transport.is_frozen:
            return
        for key in list(self.receives):
            while self.receives[key] and self.other.sends[key]:
                target, on_received = self.receives[key].popleft()
                source, on_sent = self.other.sends[key].popleft()
                fill(target, host_view(source))
                on_sent()
                on_received()

    def _wake_both(self) -> None:
        self.transport.wake()
        if self.other is not None:
            self.other.transport.wake()


class MemoryTransport:
    def __init__(self) -> None:
        self.is_frozen = False
        self.tamper: Callable[[bytes], bytes] = bytes  # changes each message, as a bad link would
        self.address = ""
        self._handler: ConnectionHandler | None = None
        self._connections: list[MemoryConnection] = []
        self._num_connections = 0
        self._is_woken = False

    async def start(self, handler: ConnectionHandler) -> str:
        self.loop = asyncio.get_running_loop()
        self._handler = handler
        self.address = f"memory:{next(_ports)}"
        _listening[self.address] = self
        return self.address

    async def connect(self, address: str, timeout_s: float) -> KvConnection:
        peer = _listening.get(address)
        if peer is not None and peer.is_frozen:
            await asyncio.sleep(timeout_s)
            peer = None
        await asyncio.sleep(0)
        if peer is None:
            raise KvTransferFailed("nothing listens at this address", reason="KV_CONNECT_FAILED")
        mine, theirs = self._add(), peer._add()
        mine.other, theirs.other = theirs, mine
        peer.loop.call_soon(peer.handler_of(theirs).on_connected, theirs)
        return mine

    async def close(self) -> None:
        _listening.pop(self.address, None)
        self.is_frozen = False
        for connection in list(self._connections):
            connection.abort("closing")
        while self._connections:
            await asyncio.sleep(0)

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def cut(self) -> None:
        """End all connections, as after SIGKILL."""
        _listening.pop(self.address, None)
        for connection in list(self._connections):
            connection.abort("cut")

    def freeze(self) -> None:
        self.is_frozen = True

    def wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            self.loop.call_soon(self._deliver)

    def handler_of(self, _: MemoryConnection) -> ConnectionHandler:
        assert self._handler is not None
        return self._handler

    def closed(self, connection: MemoryConnection, reason: str) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self.handler_of(connection).on_closed(connection, reason)

    def _add(self) -> MemoryConnection:
        self._num_connections += 1
        connection = MemoryConnection(self, self._num_connections)
        self._connections.append(connection)
        return connection

    def _deliver(self) -> None:
        self._is_woken = False
        if self.is_frozen:
            return
        for connection in list(self._connections):
            connection.deliver()
