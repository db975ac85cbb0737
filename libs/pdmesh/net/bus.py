"""Events between services.

The adapter is NATS; `MemoryBus` (tests/fakes) behaves the same in one process.

Delivery is at most once: an event may be lost, and after an outage buffered ones arrive late. So
every event carries (publisher, incarnation, sequence) and nothing is correct only if one arrives.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Message:
    """`data` is as `headers["content-type"]` says (`net.events`)."""

    subject: str
    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[Message], Awaitable[None]]


class Subscription(Protocol):
    async def unsubscribe(self) -> None: ...


class Bus(Protocol):
    """Events at most once, in order per publisher. Nothing is correct only if one arrives."""

    @property
    def is_connected(self) -> bool: ...

    async def publish(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """Hand over an event.

        Never waits for the network and never raises when disconnected: it drops and counts.
        """
        ...

    async def subscribe(
        self, pattern: str, handler: Handler, *, on_gap: Callable[[], None] | None = None
    ) -> Subscription:
        """Call `handler` for each event, in order.

        `on_gap` tells that events were lost (slow consumer, reconnect).

        Raises InvalidRequest for what is no subject, Unavailable once closed.
        """
        ...

    async def close(self) -> None: ...
