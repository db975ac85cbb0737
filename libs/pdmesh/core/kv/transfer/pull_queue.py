"""Decides which pulls of KV are under way at a decode and which wait their turn (S52, S53).

A few long pulls may share the link; more at once only slow all of them down. Short pulls spend
their time in latency rather than on the link, so many may go together. So the pulls under way are
bounded by bytes as well as by number. A pull that ends lets the next begin.

Each source has its own queue. A source that sends slowly, or not at all, holds up only its own
pulls: both the bytes under way from it and its share of the number are bounded. A pull that falls
silent does not use the link. It gives up its turn to the next pull, and continues beside that pull
if its bytes come after all. Admission bounds the total number of pulls.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

K = TypeVar("K")

MAX_ACTIVE_BYTES: Final = 64 << 20  # from one source; a pull of more bytes runs alone


@dataclass(slots=True)
class _Waiting:
    num_bytes: int
    until: float  # when it leaves the queue


@dataclass(slots=True)
class _SourceQueue(Generic[K]):
    active: dict[K, int] = field(default_factory=dict)  # bytes of each
    waiting: dict[K, _Waiting] = field(default_factory=dict)  # oldest first


@dataclass(slots=True)
class PullQueue(Generic[K]):
    """`add`, `fell_silent`, `end` and `drop_overdue` return the pulls that begin now.

    Within a source, the oldest comes first.
    """

    max_active: int
    max_bytes: int = MAX_ACTIVE_BYTES
    _queues: dict[Hashable, _SourceQueue[K]] = field(default_factory=dict)  # by source
    _source_of: dict[K, Hashable] = field(default_factory=dict)  # of every pull in a queue

    @property
    def num_waiting(self) -> int:
        return sum(len(queue.waiting) for queue in self._queues.values())

    def is_waiting(self, key: K) -> bool:
        source = self._source_of.get(key)
        return source is not None and key in self._queues[source].waiting

    def add(self, key: K, num_bytes: int, source: Hashable, until: float) -> list[K]:
        """The pull waits for its turn until `until` at most; see `drop_overdue`."""
        assert key not in self._source_of
        self._source_of[key] = source
        self._queues.setdefault(source, _SourceQueue()).waiting[key] = _Waiting(num_bytes, until)
        return self._begin()

    def fell_silent(self, key: K) -> list[K]:
        """A pull under way has received nothing for a while. Unknown keys are ignored."""
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
        """Remove the pulls whose turn has not come in time; return them and the pulls that begin.

        That its turn came too late is not held against the pull's source. All overdue pulls leave
        before any pull begins, or the end of one could let another overdue pull begin.
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
