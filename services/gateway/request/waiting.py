"""The waiting room of a gateway, with its metrics.

A request that all candidate instances have rejected waits here until one of these has a free slot.
A scenario is a kind of requests with its own instances.
"""

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

    Prefills may compute several prompts in lockstep, so that each takes as long as the longest one.
    `prefill_batch` is the number of these prompts, or 0 without lockstep. With lockstep, prompts of
    similar length are sent together.
    """

    def __init__(self, max_waiting: int, prefill_batch: int = 0) -> None:
        window = LengthWindow(prefill_batch) if prefill_batch > 1 else None
        self._room: WaitingRoom[tuple[Waiter, float]] = WaitingRoom(max_waiting, window=window)
        self._queues: dict[str, dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._room)

    @property
    def queues(self) -> Mapping[str, Mapping[int, int]]:
        """The number of queued requests, by scenario and priority, without empty queues.

        A request is queued from the time at which it first waits here until a prefill accepts it.
        While it asks the master for other instances, it is queued but not in the waiting room.
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
        """Whether the next request of this tenant would evict a waiting request."""
        return self._room.yields_to(_claim(tenant))

    def join(
        self,
        waiter: Waiter,
        instance_ids: Iterable[str],
        until: float,
        tenant: Tenant,
        num_tokens: int = 0,
    ) -> int | None:
        """Let a request wait for a slot of one of the given instances.

        Return the number to pass to `leave`, or None if the room is full. `until` is the deadline
        by which requests are ordered. `num_tokens` is the number of tokens that the instance would
        compute, 0 for a decode.
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
        """Remove a request that no longer waits, for example because its deadline has passed."""
        left = self._room.leave(number)
        if left is not None:
            self._end(left[1], time.monotonic(), "left")

    def slots_freed(self, instance_id: str, num_free: int) -> None:
        """Call `on_slot_freed` of up to `num_free` requests that wait for the instance.

        For a prefill that computes in lockstep, requests are called in batches (S46).
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
