"""Prompts that instances die of, by digest (F38): one that two of them died with is refused for a while.

Without it the client's own retries carry what migration gave up on to the next two instances. Bounded: the oldest is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class PoisonBook:
    max_deaths: int = 2
    remember_s: float = 600.0
    max_entries: int = 1024
    _deaths: dict[bytes, tuple[int, float]] = field(default_factory=dict)  # oldest first

    def __len__(self) -> int:
        return len(self._deaths)

    def add(self, digest: bytes, num_deaths: int, now: float) -> None:
        """A request with this prompt ended without an answer after so many deaths."""
        before, _ = self._get(digest, now)
        self._deaths.pop(digest, None)
        self._deaths[digest] = (before + num_deaths, now + self.remember_s)
        while len(self._deaths) > self.max_entries:
            del self._deaths[next(iter(self._deaths))]

    def clear(self, digest: bytes) -> None:
        """It was answered: whatever died before, died of something else."""
        self._deaths.pop(digest, None)

    def is_poison(self, digest: bytes, now: float) -> bool:
        num_deaths, _ = self._get(digest, now)
        return num_deaths >= self.max_deaths

    def _get(self, digest: bytes, now: float) -> tuple[int, float]:
        found = self._deaths.get(digest)
        if found is None:
            return (0, 0.0)
        if now >= found[1]:
            del self._deaths[digest]
            return (0, 0.0)
        return found
