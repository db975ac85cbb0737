"""Baselines that use the product's transport without its KV agent.

They move KV block by block, like the baseline in the P/D-Serve paper, or as a single payload. The
comparison favours the baselines: blocks go straight from cache to cache, no checksum is made, and
the receiver knows the block table. So a block costs only its bytes and its ack.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from pdmesh.kv.transport.base import ByteArray, KvConnection
from pdmesh.kv.transport.ucx import UcxTransport

_WINDOW = 32  # blocks in flight
_PAYLOADS = 2  # payloads in flight; two hide the next one's handshake, as in UCX's own test
_DEADLINE_S = 60.0


class RawPeer:
    """One end of a connection without a KV agent.

    It is the `ConnectionHandler` of its transport.
    """

    def __init__(self) -> None:
        self.transport = UcxTransport()
        self._connection: KvConnection | None = None
        self._on_message: Callable[[], None] = lambda: None
        self._next_key = 0
        # when each block of the last transfer one by one was acknowledged
        self.arrivals: list[float] = []

    async def start(self) -> str:
        return await self.transport.start(self)

    async def connect(self, address: str) -> None:
        self._connection = await self.transport.connect(address, _DEADLINE_S)

    def on_connected(self, connection: KvConnection) -> None:
        self._connection = connection

    def on_message(self, connection: KvConnection, message: memoryview) -> None:
        self._on_message()

    def on_closed(self, connection: KvConnection, reason: str) -> None:
        self._connection = None

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    @property
    def connection(self) -> KvConnection:
        assert self._connection is not None, "the peer is gone"
        return self._connection

    def keys(self, count: int) -> range:
        """The keys of the next payloads. Both ends count in the same way, so they use the same
        keys.
        """
        first = self._next_key + 1
        self._next_key += count
        return range(first, first + count)

    # -- the sender -------------------------------------------------------------------------------

    async def send_acked(self, blocks: Sequence[ByteArray]) -> float:
        """Send each block after the ack of the block before.

        Returns the time at which the first block was posted.
        """
        todo = iter(list(zip(self.keys(len(blocks)), blocks, strict=True)))
        done = asyncio.get_running_loop().create_future()
        started = 0.0

        def send_next() -> None:
            nonlocal started
            started = started or time.monotonic()
            key, block = next(todo, (0, None))
            if block is None:
                done.set_result(None)
            else:
                self.connection.send_payload(key, block, lambda: None)

        self._on_message = send_next  # the receiver's first message says that it is ready
        async with asyncio.timeout(_DEADLINE_S):
            await done
        return started

    async def send_window(self, blocks: Sequence[ByteArray], window: int = _WINDOW) -> float:
        """Send with up to `window` blocks in flight.

        Returns the time at which the first block was posted.
        """
        ready = asyncio.get_running_loop().create_future()
        self._on_message = lambda: ready.set_result(None)
        async with asyncio.timeout(_DEADLINE_S):
            await ready
            started = time.monotonic()
            await self._move(self.connection.send_payload, blocks, window)
        return started

    async def send_same(self, buffer: ByteArray, repeats: int) -> float:
        return await self.send_window([buffer] * repeats, _PAYLOADS)

    # -- the receiver -----------------------------------------------------------------------------

    async def recv_acked(self, blocks: Sequence[ByteArray]) -> float:
        """Receive all blocks; returns the time at which the last block had arrived."""
        todo = iter(list(zip(self.keys(len(blocks)), blocks, strict=True)))
        done = asyncio.get_running_loop().create_future()
        self.arrivals = []

        def recv_next() -> None:
            key, block = next(todo, (0, None))
            if block is None:
                done.set_result(None)
            else:
                self.connection.recv_payload(key, block, arrived)
            self.connection.send([b"a"])

        def arrived() -> None:
            self.arrivals.append(time.monotonic())
            recv_next()

        recv_next()
        async with asyncio.timeout(_DEADLINE_S):
            await done
        return self.arrivals[-1]

    async def recv_window(self, blocks: Sequence[ByteArray], window: int = _WINDOW) -> float:
        async with asyncio.timeout(_DEADLINE_S):
            moved = asyncio.create_task(self._move(self.connection.recv_payload, blocks, window))
            await asyncio.sleep(0)  # let the receives be posted
            self.connection.send([b"g"])
            return await moved

    async def recv_same(self, buffer: ByteArray, repeats: int) -> float:
        return await self.recv_window([buffer] * repeats, _PAYLOADS)

    async def _move(
        self,
        post: Callable[[int, ByteArray, Callable[[], None]], None],
        blocks: Sequence[ByteArray],
        window: int,
    ) -> float:
        todo = iter(list(zip(self.keys(len(blocks)), blocks, strict=True)))
        done = asyncio.get_running_loop().create_future()
        num_left = len(blocks)

        def on_done() -> None:
            nonlocal num_left
            num_left -= 1
            if num_left == 0:
                done.set_result(time.monotonic())
            post_next()

        def post_next() -> None:
            key, block = next(todo, (0, None))
            if block is not None:
                post(key, block, on_done)

        for _ in range(window):
            post_next()
        return float(await done)
