"""Requests that every candidate rejected, until one of them has a free slot (S43, S44).

Bounded. When an instance comes free, the waiters that asked for it are called in the order of their deadlines.
A waiter may wait for several instances; it is called once and must come back if it is rejected again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

W = TypeVar("W")


@dataclass(slots=True)
class WaitingRoom(Generic[W]):
    max_waiting: int
    _heaps: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    _waiters: dict[int, W] = field(default_factory=dict)
    _next_id: int = 1

    def __len__(self) -> int:
        return len(self._waiters)

    def join(self, waiter: W, instance_ids: Iterable[str], until: float) -> int | None:
        """A number to leave with, or None if the room is full."""
        if len(self._waiters) >= self.max_waiting:
            return None
        number, self._next_id = self._next_id, self._next_id + 1
        self._waiters[number] = waiter
        for instance_id in instance_ids:
            heapq.heappush(self._heaps.setdefault(instance_id, []), (until, number))
        return number

    def leave(self, number: int) -> None:
        """Idempotent. The heaps forget lazily, and all at once when nobody waits."""
        self._waiters.pop(number, None)
        if not self._waiters:
            self._heaps.clear()
            return
        for instance_id in list(self._heaps):
            self._trim(instance_id)

    def call(self, instance_id: str, num_free: int) -> list[W]:
        """The first `num_free` waiters for this instance; they have left the room."""
        called: list[W] = []
        heap = self._heaps.get(instance_id)
        while heap and len(called) < num_free:
            _, number = heapq.heappop(heap)
            waiter = self._waiters.pop(number, None)
            if waiter is not None:
                called.append(waiter)
        if not heap:
            self._heaps.pop(instance_id, None)
        return called

    def _trim(self, instance_id: str) -> None:
        """Drop the gone from the front; rebuild once most of the heap is gone."""
        heap = self._heaps[instance_id]
        while heap and heap[0][1] not in self._waiters:
            heapq.heappop(heap)
        if len(heap) > 2 * len(self._waiters) + 16:
            heap[:] = [entry for entry in heap if entry[1] in self._waiters]
            heapq.heapify(heap)
        if not heap:
            del self._heaps[instance_id]

    def check_invariants(self) -> None:
        assert len(self._waiters) <= self.max_waiting
        named = {number for heap in self._heaps.values() for _, number in heap}
        assert self._waiters.keys() <= named or not self._heaps
