"""The interface for moving KV bytes between two processes.

`ucx.py` implements it over UCX; tests also use an implementation in memory. A connection carries
messages and payloads. It keeps messages in order, and payloads in order. Messages are small and
copied. A payload moves from one arena (memory registered for KV) directly into another. Sender and
receiver match payloads by key. Callbacks run on the event loop that started the transport. There is
no coroutine per message, because one would cost more than moving a small prompt's KV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pdmesh.kv.transport.device_bytes import DeviceBytes

ByteArray = npt.NDArray[np.uint8]  # one-dimensional and contiguous
KvBytes = ByteArray | DeviceBytes  # in the host's memory, or in a GPU's memory
# `KvBytes` of an arena. The caller made the arena and knows which of the two types it has.
ArenaBytes = Any
MAX_MESSAGE = 96 << 10  # bytes


class KvConnection(Protocol):
    """The connection to one peer.

    Calls on a connection that is closed or closing do nothing. The handler's `on_closed` receives
    the reason for the end.
    """

    @property
    def key(self) -> int:
        """Unique among the connections of this transport, never reused."""
        ...

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send one message of at most MAX_MESSAGE bytes, which consists of `parts`.

        The caller may reuse the parts at once.
        """
        ...

    def send_payload(self, key: int, buffer: KvBytes, on_sent: Callable[[], None]) -> None:
        """Send all bytes of the buffer.

        `on_sent` is called when the buffer may be reused. It is not called if the connection closes
        first.
        """
        ...

    def recv_payload(self, key: int, buffer: KvBytes, on_received: Callable[[], None]) -> None:
        """Receive the next payload of `key`, which must be as long as the buffer.

        `on_received` is called when the bytes are in the buffer. It is not called if the connection
        closes first.
        """
        ...

    def abort(self, reason: str) -> None:
        """Drop the connection at once. The loop calls `on_closed` later."""
        ...


class ConnectionHandler(Protocol):
    """A transport's callbacks into its user. They must not raise."""

    def on_connected(self, connection: KvConnection) -> None:
        """A peer connected to us."""
        ...

    def on_message(self, connection: KvConnection, message: memoryview) -> None:
        """A message arrived. `message` is valid only during the call."""
        ...

    def on_closed(self, connection: KvConnection, reason: str) -> None:
        """The last callback of a connection, called exactly once.

        From now on, no send reads a buffer and no late write reaches one.
        """
        ...


class KvTransport(Protocol):
    """Accepts connections from peers and opens connections to peers."""

    async def start(self, handler: ConnectionHandler) -> str:
        """Start to accept connections. Returns the address that peers pass to `connect`.

        Raises KvTransferFailed.
        """
        ...

    async def connect(self, address: str, timeout_s: float) -> KvConnection:
        """Open a connection. Raises KvTransferFailed (KV_CONNECT_FAILED) within `timeout_s`."""
        ...

    async def close(self) -> None:
        """Abort all connections and free everything. Idempotent, in bounded time."""
        ...
