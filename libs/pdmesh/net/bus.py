"""The interface for events between services.

`nats/bus.py` implements it over NATS, and `MemoryBus` (tests/fakes) within one process. Delivery is
at most once: an event may be lost, or may arrive late after an outage. Therefore every event
carries its publisher, the publisher's incarnation (one life of a process) and a sequence number,
and correctness never depends on the arrival of one event.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Message:
    """An encoded event. `headers["content-type"]` names the encoding of `data` (`net.events`)."""

    subject: str
    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[Message], Awaitable[None]]


class Subscription(Protocol):
    async def unsubscribe(self) -> None: ...


class Bus(Protocol):
    """Delivers events at most once, in order per publisher.

    No process may depend on a single event.
    """

    @property
    def is_connected(self) -> bool: ...

    async def publish(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send an event without waiting for the network.

        Never raises when disconnected. Events that cannot be sent are dropped and counted.
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
