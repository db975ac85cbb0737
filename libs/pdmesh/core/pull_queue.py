"""Which pulls of KV are under way at a decode, and which wait their turn (S52, S53).

A few long ones at once share the link and each is done sooner than the last of a long file of them; more at once only
stretch all of them. Short ones spend their time on the way rather than on the link, so many may go together: what is
under way is bounded by bytes as well as by number. One that ends lets the next begin. How many may wait is admission's
to say, which refuses what would wait longer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

K = TypeVar("K")

MAX_ACTIVE_BYTES: Final = 64 << 20  # a longer one goes alone


@dataclass(slots=True)
class PullQueue(Generic[K]):
    """`add` and `end` return the pulls that begin now, oldest first."""

    max_active: int
    max_bytes: int = MAX_ACTIVE_BYTES
    _active: dict[K, int] = field(default_factory=dict)  # bytes of each
    _waiting: dict[K, int] = field(default_factory=dict)  # likewise, oldest first

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def is_waiting(self, key: K) -> bool:
        return key in self._waiting

    def add(self, key: K, num_bytes: int) -> list[K]:
        assert key not in self._active
        assert key not in self._waiting
        self._waiting[key] = num_bytes
        return self._begin()

    def end(self, key: K) -> list[K]:
        """It is over, or given up while it waited. Unknown keys are ignored."""
        self._active.pop(key, None)
        self._waiting.pop(key, None)
        return self._begin()

    def _begin(self) -> list[K]:
        begun: list[K] = []
        while self._waiting and self._has_room(next(iter(self._waiting.values()))):
            key = next(iter(self._waiting))
            self._active[key] = self._waiting.pop(key)
            begun.append(key)
        return begun

    def _has_room(self, num_bytes: int) -> bool:
        if not self._active:
            return True
        is_short = sum(self._active.values()) + num_bytes <= self.max_bytes
        return is_short and len(self._active) < self.max_active

    def check_invariants(self) -> None:
        assert len(self._active) <= self.max_active
        assert len(self._active) <= 1 or sum(self._active.values()) <= self.max_bytes
        assert not self._active.keys() & self._waiting.keys()
        assert not self._waiting or self._active, "somebody waits for nobody"
