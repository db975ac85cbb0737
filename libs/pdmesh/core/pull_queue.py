"""Which pulls of KV are under way at a decode, and which wait their turn (S52, S53).

A few long ones at once share the link and each is done sooner than the last of a long file of them; more at once only
stretch all of them. Short ones spend their time on the way rather than on the link, so many may go together: what is
under way is bounded by bytes as well as by number. One that ends lets the next begin.

Each source has a file of its own. One that sends slowly, or not at all, holds up what waits for itself and nothing else: its bytes
are bounded, and of the number it has no more than its share. A pull that falls silent takes no share of the link, so it
gives its turn up to the next, and goes on beside it if its bytes come after all. How many there are in all is
admission's to say, which refuses what would wait longer.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

K = TypeVar("K")

MAX_ACTIVE_BYTES: Final = 64 << 20  # of one source; a longer one goes alone


@dataclass(slots=True)
class _Waiting:
    num_bytes: int
    until: float  # its time in the file is over then


@dataclass(slots=True)
class _File(Generic[K]):
    active: dict[K, int] = field(default_factory=dict)  # bytes of each
    waiting: dict[K, _Waiting] = field(default_factory=dict)  # oldest first


@dataclass(slots=True)
class PullQueue(Generic[K]):
    """`add`, `fell_silent` and `end` return the pulls that begin now, oldest first of each source."""

    max_active: int
    max_bytes: int = MAX_ACTIVE_BYTES
    _files: dict[Hashable, _File[K]] = field(default_factory=dict)  # by source
    _source_of: dict[K, Hashable] = field(default_factory=dict)  # of all in a file

    @property
    def num_waiting(self) -> int:
        return sum(len(file.waiting) for file in self._files.values())

    def is_waiting(self, key: K) -> bool:
        source = self._source_of.get(key)
        return source is not None and key in self._files[source].waiting

    def add(self, key: K, num_bytes: int, source: Hashable, until: float) -> list[K]:
        """It waits for its turn no longer than `until`, see `overdue`."""
        assert key not in self._source_of
        self._source_of[key] = source
        self._files.setdefault(source, _File()).waiting[key] = _Waiting(num_bytes, until)
        return self._begin()

    def fell_silent(self, key: K) -> list[K]:
        """Nothing came of one that is under way for a while. Unknown keys are ignored."""
        return [] if self.is_waiting(key) else self.end(key)

    def end(self, key: K) -> list[K]:
        """It is over, or given up while it waited. Unknown keys are ignored."""
        source = self._source_of.pop(key, None)
        if source is None:
            return []
        file = self._files[source]
        file.active.pop(key, None)
        file.waiting.pop(key, None)
        if not (file.active or file.waiting):
            del self._files[source]
        return self._begin()

    def overdue(self, now: float) -> list[K]:
        """Those whose turn has not come in time, for the caller to `end`. It says nothing of their source."""
        return [
            key
            for file in self._files.values()
            for key, waiting in file.waiting.items()
            if now >= waiting.until
        ]

    def _begin(self) -> list[K]:
        begun: list[K] = []
        share = max(1, self.max_active // max(1, len(self._files)))
        for file in self._files.values():
            while file.waiting:
                key, waiting = next(iter(file.waiting.items()))
                if not self._has_room(file, waiting.num_bytes, share):
                    break
                del file.waiting[key]
                file.active[key] = waiting.num_bytes
                begun.append(key)
        return begun

    def _has_room(self, file: _File[K], num_bytes: int, share: int) -> bool:
        if not file.active:
            return True
        is_short = sum(file.active.values()) + num_bytes <= self.max_bytes
        return is_short and len(file.active) < share

    def check_invariants(self) -> None:
        for source, file in self._files.items():
            assert file.active, "somebody waits for nobody"
            assert len(file.active) <= self.max_active
            assert len(file.active) <= 1 or sum(file.active.values()) <= self.max_bytes
            assert not file.active.keys() & file.waiting.keys()
            assert all(self._source_of[key] == source for key in (*file.active, *file.waiting))
        assert len(self._source_of) == sum(
            len(file.active) + len(file.waiting) for file in self._files.values()
        )
