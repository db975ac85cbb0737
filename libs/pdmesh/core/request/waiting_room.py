"""Decides which waiting request is called when an instance has a free slot (S43, S44).

A gateway's waiting room has the requests that every candidate instance has rejected. When an
instance has a free slot, the requests that wait for it are called in this order:

- The lowest priority number comes first.
- Within one priority, the tenants take turns by their weights (start-time fair queueing).
- Within one tenant, the nearest deadline comes first. If a `window` forms batches for engines that
  compute in lockstep, prompts of similar length are called together.

A request may wait for several instances. It is called once, and must join again if it is rejected.
Gateways also use a waiting room for grammars that wait to be compiled, with the compiler as the
only instance (`services/gateway/text/grammar_checks.py`).

If the room is full, a new request may replace one with a weaker claim: a request of a lower
priority, or of a tenant that has more waiting requests for its weight. So a tenant that floods the
room keeps out only its own requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pdmesh.core.request.length_batching import LengthWindow, Place

W = TypeVar("W")


@dataclass(frozen=True, slots=True)
class Claim:
    """The tenant of a waiting request, with the tenant's weight and priority."""

    tenant: str = ""
    weight: int = 1
    priority: int = 1  # 0 is called first


@dataclass(frozen=True, slots=True)
class Joined(Generic[W]):
    """A request has joined. `number` is for `leave`. `evicted` is the waiter that it replaced."""

    number: int
    evicted: W | None = None


_Group = tuple[int, str]  # priority, tenant


@dataclass(slots=True)
class _Entry(Generic[W]):
    waiter: W
    group: _Group
    weight: int
    until: float
    instance_ids: tuple[str, ...]
    num_tokens: int


@dataclass(slots=True)
class WaitingRoom(Generic[W]):
    max_waiting: int
    num_evicted: int = 0
    window: LengthWindow | None = None  # if None, requests are called without batching
    _heaps: dict[str, dict[_Group, list[tuple[float, int]]]] = field(default_factory=dict)
    _entries: dict[int, _Entry[W]] = field(default_factory=dict)
    _members: dict[_Group, dict[int, None]] = field(default_factory=dict)
    # For the fair queueing: the virtual time at which the next request of a tenant starts.
    _turns: dict[_Group, float] = field(default_factory=dict)
    _clock: dict[int, float] = field(default_factory=dict)  # virtual time of each priority
    _next_id: int = 1

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def depths(self) -> Mapping[int, int]:
        """The number of waiting requests, by priority."""
        counts: dict[int, int] = {}
        # Copied, because other threads call this method.
        for (priority, _), members in list(self._members.items()):
            counts[priority] = counts.get(priority, 0) + len(members)
        return counts

    def join(
        self,
        waiter: W,
        instance_ids: Iterable[str],
        until: float,
        claim: Claim = Claim(),
        num_tokens: int = 0,
    ) -> Joined[W] | None:
        """Add a waiter. Returns None if the room is full and no waiter has a weaker claim.

        `until` is the deadline. `num_tokens` is the number of tokens that an engine must compute
        for the request in a batch. If it is 0, the request is called without a batch.
        """
        evicted: W | None = None
        if len(self._entries) >= self.max_waiting:
            number = self._least_claim(claim)
            if number is None:
                return None
            evicted = self._entries[number].waiter
            self.leave(number)
            self.num_evicted += 1
        number, self._next_id = self._next_id, self._next_id + 1
        group = (claim.priority, claim.tenant)
        entry = _Entry(waiter, group, claim.weight, until, tuple(instance_ids), num_tokens)
        self._entries[number] = entry
        self._members.setdefault(group, {})[number] = None
        for instance_id in entry.instance_ids:
            heaps = self._heaps.setdefault(instance_id, {})
            heapq.heappush(heaps.setdefault(group, []), (until, number))
        return Joined(number, evicted)

    def yields_to(self, claim: Claim) -> bool:
        """Whether a request with a weaker claim waits here."""
        return self._group_to_yield(claim) is not None

    def leave(self, number: int) -> W | None:
        """Remove a waiter and return it, or return None if it has left before.

        The waiter's entries in the heaps are dropped later, or at once if the room becomes empty.
        """
        entry = self._forget(number)
        if entry is None:
            return None
        if not self._entries:
            self._heaps.clear()
            self._turns.clear()
            self._clock.clear()
        for instance_id in entry.instance_ids:
            self._trim(instance_id, entry.group)
        return entry.waiter

    def call(self, instance_id: str, num_free: int) -> list[W]:
        """Remove and return at most `num_free` waiters of this instance, in calling order."""
        called: list[W] = []
        while len(called) < num_free and (group := self._next_group(instance_id)) is not None:
            numbers = self._first(instance_id, group, num_free - len(called))
            if not numbers:
                break
            start = max(self._turns.get(group, 0.0), self._clock.get(group[0], 0.0))
            self._clock[group[0]] = start
            self._turns[group] = start + len(numbers) / self._entries[numbers[0]].weight
            for number in numbers:
                called.append(self._entries[number].waiter)
                self.leave(number)
        return called

    def _first(self, instance_id: str, group: _Group, num_free: int) -> list[int]:
        """The next waiter of this priority and tenant, or the next batch.

        The result is empty if there are too few free slots for the batch. Waiters that do not fill
        a batch do not wait for more waiters (S46).
        """
        heap = self._heaps[instance_id][group]
        first = heap[0][1]
        if self.window is None or not self._entries[first].num_tokens:
            return [first]
        waiting = [entry for entry in heap if entry[1] in self._entries]
        if num_free < min(self.window.dp_size, len(waiting)):
            return []
        return self.window.take([Place(n, self._entries[n].num_tokens) for _, n in sorted(waiting)])

    def _next_group(self, instance_id: str) -> _Group | None:
        """The priority and tenant to call next, by priority and then by the tenants' turns."""
        heaps = self._heaps.get(instance_id)
        if not heaps:
            return None
        for group in list(heaps):
            self._trim(instance_id, group)
        heaps = self._heaps.get(instance_id, {})

        def order(group: _Group) -> tuple[int, float, float, str]:
            turn = max(self._turns.get(group, 0.0), self._clock.get(group[0], 0.0))
            return (group[0], turn, heaps[group][0][0], group[1])

        return min(heaps, key=order, default=None)

    def _least_claim(self, claim: Claim) -> int | None:
        """The waiter that a new request with this claim may replace, or None.

        Among the waiters of the priority and tenant that must yield, it has the latest deadline.
        """
        group = self._group_to_yield(claim)
        if group is None:
            return None
        return max(self._members[group], key=lambda n: (self._entries[n].until, n))

    def _group_to_yield(self, claim: Claim) -> _Group | None:
        if not self._members:
            return None
        lowest = max(priority for priority, _ in self._members)
        if lowest < claim.priority:
            return None
        share, group = max(
            (len(members) / self._weight(group), group)
            for group, members in self._members.items()
            if group[0] == lowest
        )
        if lowest == claim.priority:
            own = len(self._members.get((claim.priority, claim.tenant), ()))
            if group[1] == claim.tenant or share <= (own + 1) / claim.weight:
                return None
        return group

    def _weight(self, group: _Group) -> int:
        return self._entries[next(iter(self._members[group]))].weight

    def _forget(self, number: int) -> _Entry[W] | None:
        entry = self._entries.pop(number, None)
        if entry is not None:
            if self.window is not None:
                self.window.forget(number)
            members = self._members[entry.group]
            del members[number]
            if not members:
                del self._members[entry.group]
        return entry

    def _trim(self, instance_id: str, group: _Group) -> None:
        """Drop the entries at the front of a heap whose waiters have left.

        If most waiters of the heap have left, the heap is rebuilt.
        """
        heaps = self._heaps.get(instance_id)
        heap = heaps.get(group) if heaps is not None else None
        if heaps is None or heap is None:
            return
        while heap and heap[0][1] not in self._entries:
            heapq.heappop(heap)
        if len(heap) > 2 * len(self._members.get(group, ())) + 16:
            heap[:] = [place for place in heap if place[1] in self._entries]
            heapq.heapify(heap)
        if not heap:
            del heaps[group]
            if not heaps:
                del self._heaps[instance_id]

    def check_invariants(self) -> None:
        assert len(self._entries) <= self.max_waiting
        members = {number for group in self._members.values() for number in group}
        assert members == set(self._entries)
        assert self.window is None or self.window.known() <= members
        for number, entry in self._entries.items():
            for instance_id in entry.instance_ids:
                assert (entry.until, number) in self._heaps[instance_id][entry.group]
        for heaps in self._heaps.values():
            for group, heap in heaps.items():
                assert len(heap) <= 2 * len(self._members.get(group, ())) + 17
