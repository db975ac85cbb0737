"""The waiting room with its metrics: depth by priority, waiting times, evictions and refusals."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Protocol

from pdmesh.core.request.length_batching import LengthWindow
from pdmesh.core.request.waiting_room import Claim, WaitingRoom
from pdmesh.core.tenancy.limits import Tenant
from pdmesh.telemetry import metrics, names

_waits = metrics.histogram(names.WAIT_DURATION, "Time in the waiting room, by how it ended")
_evicted = metrics.counter(
    names.WAITING_EVICTED, "Waiting requests displaced by one of higher rank"
)
_refused = metrics.counter(names.WAITING_REFUSED, "Requests refused by a full waiting room")


class Waiter(Protocol):
    def on_slot_freed(self, instance_id: str) -> None: ...

    def on_evicted(self) -> None: ...


class Waiting:
    """The waiting room of a gateway.

    `prefill_batch`: how many prompts a prefill computes in lockstep; 0: none. Prompts that are
    computed in lockstep are sent in batches of similar length.
    """

    def __init__(self, max_waiting: int, prefill_batch: int = 0) -> None:
        window = LengthWindow(prefill_batch) if prefill_batch > 1 else None
        self._room: WaitingRoom[tuple[Waiter, float]] = WaitingRoom(max_waiting, window=window)
        self._queues: dict[str, dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._room)

    @property
    def queues(self) -> Mapping[str, Mapping[int, int]]:
        """The number of requests that were rejected and not yet accepted, by scenario and priority.

        A request counts from its first rejection on, also while it asks for another plan and is not
        in the room. Empty queues are left out.
        """
        return self._queues

    def count(self, scenario: str, priority: int, change: int) -> None:
        """Add `change`, which is 1 or -1, to the number of requests in a queue."""
        queue = self._queues.setdefault(scenario, {})
        queue[priority] = queue.get(priority, 0) + change
        if not queue[priority]:
            del queue[priority]
            if not queue:
                del self._queues[scenario]

    def yields_to(self, tenant: Tenant) -> bool:
        """Whether a waiting request would have to make room for this tenant's next request."""
        return self._room.yields_to(_claim(tenant))

    def join(
        self,
        waiter: Waiter,
        instance_ids: Iterable[str],
        until: float,
        tenant: Tenant,
        num_tokens: int = 0,
    ) -> int | None:
        """Return the number to pass to `leave`, or None if the room is full.

        `num_tokens` as in `WaitForSlot`.
        """
        now = time.monotonic()
        joined = self._room.join((waiter, now), instance_ids, until, _claim(tenant), num_tokens)
        if joined is None:
            _refused.add(1)
            return None
        if joined.evicted is not None:
            evicted, since = joined.evicted
            self._end(since, now, "evicted")
            _evicted.add(1)
            evicted.on_evicted()
        return joined.number

    def leave(self, number: int) -> None:
        """Remove a request that gave up waiting, or whose time is over."""
        left = self._room.leave(number)
        if left is not None:
            self._end(left[1], time.monotonic(), "left")

    def slots_freed(self, instance_id: str, num_free: int) -> None:
        """Call up to `num_free` of the requests that wait for the instance.

        Prompts for a prefill that computes in lockstep are called in batches (S46).
        """
        now = time.monotonic()
        for waiter, since in self._room.call(instance_id, num_free):
            self._end(since, now, "called")
            waiter.on_slot_freed(instance_id)

    def _end(self, since: float, now: float, outcome: str) -> None:
        _waits.record(now - since, {names.ATTR_OUTCOME: outcome})

    def depths(self) -> Iterable[tuple[float, dict[str, str]]]:
        depths = self._room.depths
        for priority in sorted({0, 1, *depths}):
            yield depths.get(priority, 0), {"priority": str(priority)}


def _claim(tenant: Tenant) -> Claim:
    return Claim(tenant.name, tenant.weight, tenant.priority)
