"""Tests how a connection to NATS is closed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdmesh.net.nats.bus import NatsBus


class Client:
    """Stands in for the client of nats-py, which cancels each of its tasks once when it closes."""

    def __init__(self) -> None:
        self.num_swallowed = 0
        self._reading_task = self._ping_interval_task = self._flusher_task = None
        self._reconnection_task: asyncio.Task[None] | None = None

    async def reconnect(self) -> None:
        """Swallow two cancellations, as `wait_for` does when its result is already there."""
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if self.num_swallowed == 2:
                    raise
                self.num_swallowed += 1

    async def close(self) -> None:
        assert self._reconnection_task is not None
        self._reconnection_task.cancel()
        await asyncio.sleep(0)


@pytest.mark.fault("F18")
async def test_a_reconnection_that_swallows_a_cancellation_still_ends() -> None:
    """Otherwise the end of the event loop would wait for this task forever."""
    client: Any = Client()
    client._reconnection_task = asyncio.create_task(client.reconnect())
    await asyncio.sleep(0)
    bus = NatsBus("nats://127.0.0.1:4222")
    bus._client = client
    await asyncio.wait_for(bus.close(), 30)
    assert client._reconnection_task.cancelled()
    assert client.num_swallowed == 2


async def test_a_bus_that_is_closed_by_a_task_of_its_client_does_not_wait_for_itself() -> None:
    client: Any = Client()
    bus = NatsBus("nats://127.0.0.1:4222")
    bus._client = client

    async def close() -> None:
        client.close = lambda: asyncio.sleep(0)
        await bus.close()

    client._reconnection_task = asyncio.create_task(close())
    await asyncio.wait_for(client._reconnection_task, 30)


async def test_a_wait_that_is_cancelled_does_not_cancel_the_task_that_closes_the_bus() -> None:
    """Both tasks wait for the end of one socket."""
    client: Any = Client()
    closed = asyncio.get_running_loop().create_future()

    async def close() -> None:
        await closed

    client.close = close
    bus = NatsBus("nats://127.0.0.1:4222")
    bus._client = client
    closing = asyncio.create_task(bus.close())
    await asyncio.sleep(0)
    closed.cancel()
    await closing


async def test_closing_a_bus_can_be_cancelled() -> None:
    client: Any = Client()
    client.close = asyncio.get_running_loop().create_future
    bus = NatsBus("nats://127.0.0.1:4222")
    bus._client = client
    closing = asyncio.create_task(bus.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
