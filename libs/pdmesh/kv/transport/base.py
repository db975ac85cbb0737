"""Moving KV bytes between two processes.

The adapter is UCX (`ucx.py`); tests also have one in memory.

A connection has two lanes, each in order. Messages are small and copied. Payloads go straight from
one arena into another, without a copy here, and are matched by key. Callbacks run on the event loop
that started the transport; there is no coroutine per message, which would cost more than moving a
small prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pdmesh.kv.transport.device_bytes import DeviceBytes

ByteArray = npt.NDArray[np.uint8]  # one-dimensional and contiguous
KvBytes = ByteArray | DeviceBytes  # in the host's memory or a GPU's
ArenaBytes = Any  # `KvBytes` of an arena; its user gave the arena, and knows which of the two
MAX_MESSAGE = 96 << 10  # bytes


class KvConnection(Protocol):
    """The connection to one peer.

    Calls on a connection that is closed or closing do nothing; `on_closed` says why it closed.
    """

    @property
    def key(self) -> int:
        """Unique among the connections of this transport, never reused."""
        ...

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send one message of at most MAX_MESSAGE bytes, made of parts.

        The parts may be reused at once.
        """
        ...

    def send_payload(self, key: int, buffer: KvBytes, on_sent: Callable[[], None]) -> None:
        """Send all bytes.

        `on_sent` is called when the buffer may be reused, but not if the connection closes first.
        """
        ...

    def recv_payload(self, key: int, buffer: KvBytes, on_received: Callable[[], None]) -> None:
        """Receive the next payload of `key`, which is as long as the buffer.

        `on_received` is called as `on_sent` is in `send_payload`.
        """
        ...

    def abort(self, reason: str) -> None:
        """Drop the connection at once. `on_closed` follows, from the loop."""
        ...


class ConnectionHandler(Protocol):
    """A transport's callbacks into its user. They must not raise."""

    def on_connected(self, connection: KvConnection) -> None:
        """A peer connected to us."""
        ...

    def on_message(self, connection: KvConnection, message: memoryview) -> None:
        """`message` is valid during the call only."""
        ...

    def on_closed(self, connection: KvConnection, reason: str) -> None:
        """The last callback of a connection, called exactly once.

        From now on no send reads and no late write reaches any buffer.
        """
        ...


class KvTransport(Protocol):
    """Connections that carry small messages in order, and payloads from one arena into another."""

    async def start(self, handler: ConnectionHandler) -> str:
        """Accept connections; returns the address that peers pass to `connect`.

        Raises KvTransferFailed.
        """
        ...

    async def connect(self, address: str, timeout_s: float) -> KvConnection:
        """Raises KvTransferFailed (KV_CONNECT_FAILED) within `timeout_s`."""
        ...

    async def close(self) -> None:
        """Abort all connections and free everything. Bounded in time, idempotent."""
        ...
