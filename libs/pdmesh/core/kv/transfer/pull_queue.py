"""Decides which pulls of KV run at a decode and which wait for their turn (S52, S53).

A few long pulls may share the link. More long pulls at once only slow all of them down. Short pulls
spend their time in latency rather than on the link, so many of them may run together. So the
running pulls are bounded by their bytes as well as by their number. The end of a pull lets the next
one begin.

Each source has its own queue. Both the bytes and the number of pulls that run from one source are
bounded, so a slow source delays only its own pulls. A pull that receives nothing for a while does
not use the link. The pull gives up its turn, and the next pull begins. If the silent pull's bytes
arrive after all, it continues beside that next pull. Admission bounds the total number of pulls.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

K = TypeVar("K")

MAX_ACTIVE_BYTES: Final = 64 << 20  # from one source; a larger pull runs alone


@dataclass(slots=True)
class _Waiting:
    num_bytes: int
    until: float  # the pull leaves the queue if its turn has not come by this time


@dataclass(slots=True)
class _SourceQueue(Generic[K]):
    active: dict[K, int] = field(default_factory=dict)  # the bytes of each pull
    waiting: dict[K, _Waiting] = field(default_factory=dict)  # oldest first


@dataclass(slots=True)
class PullQueue(Generic[K]):
    """The queues of all sources. Each source's oldest pull begins first.

    `add`, `fell_silent`, `end` and `drop_overdue` return the pulls that begin now.
    """

    max_active: int
    max_bytes: int = MAX_ACTIVE_BYTES
    _queues: dict[Hashable, _SourceQueue[K]] = field(default_factory=dict)  # by source
    _source_of: dict[K, Hashable] = field(default_factory=dict)  # for every pull in a queue

    @property
    def num_waiting(self) -> int:
        return sum(len(queue.waiting) for queue in self._queues.values())

    def is_waiting(self, key: K) -> bool:
        source = self._source_of.get(key)
        return source is not None and key in self._queues[source].waiting

    def add(self, key: K, num_bytes: int, source: Hashable, until: float) -> list[K]:
        """Queue a pull. If its turn has not come by `until`, `drop_overdue` removes it."""
        assert key not in self._source_of
        self._source_of[key] = source
        self._queues.setdefault(source, _SourceQueue()).waiting[key] = _Waiting(num_bytes, until)
        return self._begin()

    def fell_silent(self, key: K) -> list[K]:
        """A running pull has received nothing for a while. Unknown keys are ignored."""
        return [] if self.is_waiting(key) else self.end(key)

    def end(self, key: K) -> list[K]:
        """The pull is over, or was given up while it waited. Unknown keys are ignored."""
        source = self._source_of.pop(key, None)
        if source is None:
            return []
        queue = self._queues[source]
        queue.active.pop(key, None)
        queue.waiting.pop(key, None)
        if not (queue.active or queue.waiting):
            del self._queues[source]
        return self._begin()

    def drop_overdue(self, now: float) -> tuple[list[K], list[K]]:
        """Remove the pulls whose turn has not come in time. Returns them and the pulls that begin.

        The source of an overdue pull is not to blame. All overdue pulls leave before any pull
        begins. Otherwise the removal of one could let another overdue pull begin.
        """
        dropped = [
            key
            for queue in self._queues.values()
            for key, waiting in queue.waiting.items()
            if now >= waiting.until
        ]
        for key in dropped:
            del self._queues[self._source_of.pop(key)].waiting[key]
        return dropped, self._begin() if dropped else []

    def _begin(self) -> list[K]:
        begun: list[K] = []
        share = max(1, self.max_active // max(1, len(self._queues)))
        for queue in self._queues.values():
            while queue.waiting:
                key, waiting = next(iter(queue.waiting.items()))
                if not self._has_room(queue, waiting.num_bytes, share):
                    break
                del queue.waiting[key]
                queue.active[key] = waiting.num_bytes
                begun.append(key)
        return begun

    def _has_room(self, queue: _SourceQueue[K], num_bytes: int, share: int) -> bool:
        if not queue.active:
            return True
        is_short = sum(queue.active.values()) + num_bytes <= self.max_bytes
        return is_short and len(queue.active) < share

    def check_invariants(self) -> None:
        for source, queue in self._queues.items():
            assert queue.active, "a pull waits though none is under way"
            assert len(queue.active) <= self.max_active
            assert len(queue.active) <= 1 or sum(queue.active.values()) <= self.max_bytes
            assert not queue.active.keys() & queue.waiting.keys()
            assert all(self._source_of[key] == source for key in (*queue.active, *queue.waiting))
        assert len(self._source_of) == sum(
            len(queue.active) + len(queue.waiting) for queue in self._queues.values()
        )
