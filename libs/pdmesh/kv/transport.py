"""Moving KV bytes between two processes. The adapter is UCX (`ucx.py`); tests also have one in memory.

A connection carries whole messages in order, in both directions, like a queue of buffers: small
control messages (`kv.wire`) and payload ranges straight into and out of an arena, without a copy here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

ByteArray = npt.NDArray[np.uint8]  # one-dimensional and contiguous


class KvConnection(Protocol):
    """One peer. All methods raise KvTransferFailed when the peer is gone or the connection was aborted."""

    async def send(self, buffer: ByteArray) -> None:
        """Send all bytes; returns when the buffer may be reused."""
        ...

    async def recv(self, buffer: ByteArray) -> None:
        """Fill the buffer with exactly the next message, which must have its length."""
        ...

    async def abort(self) -> None:
        """Drop the connection at once. When this returns, no late write can reach any buffer given to `recv`."""
        ...


class KvTransport(Protocol):
    async def listen(self, on_connection: Callable[[KvConnection], Awaitable[None]]) -> str:
        """Accept connections; returns the address that peers pass to `connect`."""
        ...

    async def connect(self, address: str, timeout_s: float) -> KvConnection: ...

    async def close(self) -> None: ...
