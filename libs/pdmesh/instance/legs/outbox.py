"""Gathers the output for one gateway into messages, and decides when each message is sent.

The session's writer takes everything that waits as one message. While the writer is busy, the
tokens of several steps gather. Tokens are sent at once unless the last message was sent less than
`gap_s` ago, so that very short steps do not cost a message each. Events that are not urgent wait up
to `gap_s` for other events. The outbox is bounded: a gateway that does not read is cut off (F28).

A leg is a request's stay on the instance. The acceptance of a leg is the event that tells the
gateway that the instance has taken the leg.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from pdmesh.v1.instance_service_pb2 import (
    Accepted,
    Load,
    Progress,
    SessionEvent,
    SessionResponse,
)

MAX_PENDING: Final = 200_000  # tokens and events together: some MB
_ACCEPTED: Final = Accepted()
_EVENT_WEIGHT: Final = 8  # an event takes about as much memory as this many tokens
_BYTES_PER_WEIGHT: Final = 256  # this many bytes of vectors count as one token


@dataclass(slots=True)
class _Unsent:
    keys: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    accepted: dict[int, float] = field(default_factory=dict)  # when to send each, by key
    events: list[SessionEvent] = field(default_factory=list)
    load: Load | None = None
    progress: Progress | None = None
    due_at: float = math.inf
    num_value_bytes: int = 0  # the bytes of vectors and scores

    @property
    def weight(self) -> int:
        events = _EVENT_WEIGHT * (len(self.accepted) + len(self.events))
        return len(self.keys) + events + self.num_value_bytes // _BYTES_PER_WEIGHT

    def hold_back(self, now: float) -> dict[int, float]:
        """Remove and return the acceptances that are not due yet."""
        held = {key: at for key, at in self.accepted.items() if at > now}
        for key in held:
            del self.accepted[key]
        return held

    def to_response(self) -> SessionResponse:
        response = SessionResponse()
        if self.keys:
            response.tokens.keys.extend(self.keys)
            response.tokens.token_ids.extend(self.token_ids)
        if self.accepted:
            response.events.extend(
                SessionEvent(key=key, accepted=_ACCEPTED) for key in self.accepted
            )
        if self.events:
            response.events.extend(self.events)
        if self.load is not None:
            response.load.CopyFrom(self.load)
        if self.progress is not None:
            response.progress.CopyFrom(self.progress)
        return response


class Outbox:
    """One session's outbox. `on_cut` is called once if the gateway does not keep up."""

    def __init__(
        self, gateway_id: str, stall_s: float, clock: Callable[[], float], gap_s: float = 0.0
    ) -> None:
        self.gateway_id = gateway_id
        self.on_cut: Callable[[], None] = lambda: None
        self.is_closed = False
        self.wants_load = False  # the gateway must get the load once the instance has a free slot
        self.load_version = -1  # the version of the last Load sent
        self._stall_s, self._clock, self._gap_s = stall_s, clock, gap_s
        self._unsent = _Unsent()
        self._taken_at = -math.inf
        self._waiting_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._ready = asyncio.Event()

    def add_tokens(self, keys: Sequence[int], token_ids: Sequence[int]) -> None:
        self._unsent.keys.extend(keys)
        self._unsent.token_ids.extend(token_ids)
        self._send_by(self._taken_at + self._gap_s)

    def add_event(self, event: SessionEvent, *, is_urgent: bool = True) -> None:
        """Add an event. `is_urgent` means that the gateway waits for this event."""
        self._unsent.accepted.pop(event.key, None)
        self._unsent.events.append(event)
        self._send_by(-math.inf if is_urgent else self._clock() + self._gap_s)

    def add_values(self, event: SessionEvent) -> None:
        """Add vectors or scores, which may be large."""
        self._unsent.num_value_bytes += len(event.pooled.values)
        self.add_event(event)

    def add_sign(self, event: SessionEvent) -> None:
        """Add an event that is not urgent. Unlike `add_event`, keep the leg's acceptance.

        Older gateways do not understand these events, so they need the acceptance.
        """
        self._unsent.events.append(event)
        self._send_by(self._clock() + self._gap_s)

    def add_accepted(self, key: int, hold_s: float = 0.0) -> None:
        """Add a leg's acceptance.

        The acceptance is left out if `add_event` adds an event of the leg within `hold_s` or before
        the message is sent, because the event implies the acceptance.
        """
        now = self._clock()
        self._unsent.accepted[key] = now + hold_s
        self._send_by(now + max(hold_s, self._gap_s))

    def set_load(self, load: Load, version: int, *, is_urgent: bool = True) -> None:
        self._unsent.load, self.load_version = load, version
        self._send_by(-math.inf if is_urgent else self._clock() + self._gap_s)

    def set_progress(self, progress: Progress) -> None:
        """Set the progress to be sent. It waits up to `gap_s` for other events."""
        self._unsent.progress = progress
        self._send_by(self._clock() + self._gap_s)

    def _send_by(self, due_at: float) -> None:
        self._unsent.due_at = min(self._unsent.due_at, due_at)

    @property
    def num_pending(self) -> int:
        """The size of the waiting output, in tokens. An event counts as several tokens."""
        return self._unsent.weight

    @property
    def has_something(self) -> bool:
        return self.num_pending > 0

    def flush(self) -> None:
        """Wake the writer. If too much output waits, or waits for too long, cut the session."""
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
        """Let the writer end once it has taken the waiting output."""
        self.is_closed = True
        self._ready.set()

    async def next(self) -> SessionResponse | None:
        """Wait for the next message. Returns None when the session is over."""
        while not self._is_due():
            if self.is_closed:
                return None
            self._ready.clear()
            await self._ready.wait()
        unsent, self._unsent = self._unsent, _Unsent()
        self._taken_at, self._waiting_since = self._clock(), None
        if unsent.accepted and not self.is_closed:
            self._unsent.accepted = unsent.hold_back(self._taken_at)
            self._unsent.due_at = min(self._unsent.accepted.values(), default=math.inf)
        return unsent.to_response()

    def _is_due(self) -> bool:
        if not (self.has_something or self._unsent.load or self._unsent.progress):
            self._waiting_since = None
            return False
        due_at = self._unsent.due_at
        rest_s = due_at - self._clock()
        if rest_s <= 0 or self.is_closed:
            return True
        if due_at < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = due_at
            self._timer = asyncio.get_running_loop().call_later(rest_s, self._on_timer)
        return False

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self._ready.set()
