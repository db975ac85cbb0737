"""What waits to be sent to one gateway: whole messages' worth, taken by the session's writer when it is ready.

While the writer is busy, steps pile up into one message. Within a message the tokens come first, so a token
of a leg whose opening event (accepted, first token) still waits begins a new message. The pile is bounded:
a gateway that does not read is cut off rather than remembered without end (F28).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from pdmesh.v1.instance_service_pb2 import Load, SessionEvent, SessionResponse

MAX_PENDING: Final = 200_000  # tokens and events together: some MB
_EVENT_WEIGHT: Final = 8  # an event weighs about as much as so many tokens


@dataclass(slots=True)
class _Part:
    keys: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    events: list[SessionEvent] = field(default_factory=list)
    opened: set[int] = field(default_factory=set)  # keys that an event of this part opens


class Outbox:
    """One session's. `on_cut` is called once if the gateway does not keep up."""

    def __init__(self, gateway_id: str, stall_s: float, clock: Callable[[], float]) -> None:
        self.gateway_id = gateway_id
        self.on_cut: Callable[[], None] = lambda: None
        self.is_closed = False
        self.wants_load = False  # was told that the instance is full: tell it when that ends
        self.load_version = -1  # of the last Load sent
        self._load: Load | None = None
        self._stall_s, self._clock = stall_s, clock
        self._parts: deque[_Part] = deque([_Part()])
        self.num_pending = 0  # tokens, and events by their weight
        self._waiting_since: float | None = None
        self._ready = asyncio.Event()

    def add_tokens(self, keys: Sequence[int], token_ids: Sequence[int]) -> None:
        part = self._parts[-1]
        if part.opened and not part.opened.isdisjoint(keys):
            part = _Part()
            self._parts.append(part)
        part.keys.extend(keys)
        part.token_ids.extend(token_ids)
        self.num_pending += len(keys)

    def add_event(self, event: SessionEvent, *, opens: bool = False) -> None:
        """`opens`: tokens of this key must come after the event."""
        part = self._parts[-1]
        part.events.append(event)
        if opens:
            part.opened.add(event.key)
        self.num_pending += _EVENT_WEIGHT

    def set_load(self, load: Load, version: int) -> None:
        self._load, self.load_version = load, version

    @property
    def has_something(self) -> bool:
        return self.num_pending > 0

    def flush(self) -> None:
        """Let the writer take what is there; cut the session if it has not for too long."""
        if self.is_closed:
            return
        now = self._clock()
        if self._waiting_since is None:
            self._waiting_since = now
        if self.num_pending > MAX_PENDING or now - self._waiting_since > self._stall_s:
            self.close()
            self.on_cut()
            return
        self._ready.set()

    def close(self) -> None:
        """Nothing more is added; the writer ends once it has taken what is there."""
        self.is_closed = True
        self._ready.set()

    async def next(self) -> SessionResponse | None:
        """The next message, waiting for one. None when the session is over."""
        while not (self.num_pending or self._load):
            self._waiting_since = None
            if self.is_closed:
                return None
            self._ready.clear()
            await self._ready.wait()
        return self._take()

    def _take(self) -> SessionResponse:
        part = self._parts.popleft()
        if not self._parts:
            self._parts.append(_Part())
        response = SessionResponse()
        if part.keys:
            response.tokens.keys.extend(part.keys)
            response.tokens.token_ids.extend(part.token_ids)
        if part.events:
            response.events.extend(part.events)
        if self._load is not None:
            response.load.CopyFrom(self._load)
            self._load = None
        self.num_pending -= len(part.keys) + _EVENT_WEIGHT * len(part.events)
        self._waiting_since = self._clock() if self.num_pending else None
        return response
