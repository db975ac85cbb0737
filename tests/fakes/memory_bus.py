"""A fake of `NatsBus` in one process, with a server that can have outages.

Contract tests check that both buses behave alike.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pdmesh.errors import InvalidRequest
from pdmesh.net.bus import Handler, Message


@dataclass
class MemoryServer:
    """The server that all buses of a test share. While `is_up` is False, events are lost."""

    is_up: bool = True
    subscriptions: list[MemorySubscription] = field(default_factory=list)

    def restore(self) -> None:
        """End an outage, in which every subscriber may have missed events."""
        self.is_up = True
        for subscription in list(self.subscriptions):
            subscription.gap()


class MemorySubscription:
    def __init__(
        self,
        server: MemoryServer,
        pattern: str,
        handler: Handler,
        on_gap: Callable[[], None] | None,
    ) -> None:
        self._server, self._handler, self._on_gap = server, handler, on_gap
        self._pattern = pattern.split(".")
        self._queue: asyncio.Queue[Message] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    def offer(self, message: Message) -> None:
        if self._matches(message.subject.split(".")):
            self._queue.put_nowait(message)

    def gap(self) -> None:
        if self._on_gap is not None:
            self._on_gap()

    async def unsubscribe(self) -> None:
        if self in self._server.subscriptions:
            self._server.subscriptions.remove(self)
        self._task.cancel()
        await asyncio.wait([self._task])

    def _matches(self, tokens: list[str]) -> bool:
        for i, wanted in enumerate(self._pattern):
            if wanted == ">":
                return len(tokens) > i
            if i >= len(tokens) or wanted not in ("*", tokens[i]):
                return False
        return len(tokens) == len(self._pattern)

    async def _run(self) -> None:
        while True:
            message = await self._queue.get()
            with contextlib.suppress(Exception):  # an error in a handler must not affect the bus
                await self._handler(message)


class MemoryBus:
    def __init__(self, server: MemoryServer | None = None) -> None:
        self.server = server or MemoryServer()
        self._own: list[MemorySubscription] = []

    @property
    def is_connected(self) -> bool:
        return self.server.is_up

    async def publish(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        if self.server.is_up:
            for subscription in self.server.subscriptions:
                subscription.offer(Message(subject, data, dict(headers or {})))

    async def subscribe(
        self, pattern: str, handler: Handler, *, on_gap: Callable[[], None] | None = None
    ) -> MemorySubscription:
        if pattern.split() != [pattern] or not all(pattern.split(".")):
            raise InvalidRequest(f"{pattern!r} is not a NATS subject", field="pattern")
        subscription = MemorySubscription(self.server, pattern, handler, on_gap)
        self.server.subscriptions.append(subscription)
        self._own.append(subscription)
        return subscription

    async def close(self) -> None:
        for subscription in self._own:
            await subscription.unsubscribe()
