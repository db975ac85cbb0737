"""Events between services.

The adapter is NATS; `MemoryBus` (tests/fakes) behaves the same in one process.

Delivery is at most once: an event may be lost, and after an outage buffered events arrive late. So
every event carries (publisher, incarnation, sequence), and correctness never depends on the arrival
of one event.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Message:
    """`headers["content-type"]` says how `data` is encoded (`net.events`)."""

    subject: str
    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[Message], Awaitable[None]]


class Subscription(Protocol):
    async def unsubscribe(self) -> None: ...


class Bus(Protocol):
    """Delivers events at most once, in order per publisher. No event may be essential."""

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

        `on_gap` is called when events were lost (slow consumer, reconnect). Raises InvalidRequest
        for an invalid subject, Unavailable once closed.
        """
        ...

    async def close(self) -> None: ...
