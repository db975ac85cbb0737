"""Which pulls of KV are under way at a decode, and which wait their turn (S52, S53).

Some at once share the link and each is done sooner than the last of a long file of them; more at once only
stretch all of them. One that ends lets the next begin. Both numbers are bounded by admission, which refuses
what would wait longer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K")


@dataclass(slots=True)
class PullQueue(Generic[K]):
    """`add` and `end` return the pulls that begin now, oldest first."""

    max_active: int
    _active: set[K] = field(default_factory=set)
    _waiting: deque[K] = field(default_factory=deque)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        return len(self._active)

    def is_waiting(self, key: K) -> bool:
        return key in self._waiting

    def add(self, key: K) -> list[K]:
        assert key not in self._active
        assert key not in self._waiting
        self._waiting.append(key)
        return self._begin()

    def end(self, key: K) -> list[K]:
        """It is over, or given up while it waited. Unknown keys are ignored."""
        self._active.discard(key)
        if key in self._waiting:
            self._waiting.remove(key)
        return self._begin()

    def _begin(self) -> list[K]:
        begun: list[K] = []
        while self._waiting and len(self._active) < self.max_active:
            key = self._waiting.popleft()
            self._active.add(key)
            begun.append(key)
        return begun

    def check_invariants(self) -> None:
        assert len(self._active) <= self.max_active
        assert not self._active & set(self._waiting)
        assert not self._waiting or len(self._active) == self.max_active
