"""Decides which tokenizers a gateway keeps in memory, and when to retry one that could not be
loaded.

All tokenizers in memory take at most `max_bytes`, by their estimated sizes. If there is no room,
the least recently used ones leave first. The tokenizer that was loaded last stays even if it alone
is larger, because a request waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

_FIRST_RETRY_S: Final = 5.0
_LONGEST_RETRY_S: Final = 120.0
_MAX_FAILURES: Final = 1024


@dataclass(frozen=True, slots=True)
class _Failure:
    num_times: int
    retry_at: float


@dataclass(slots=True)
class Residency:
    """The tokenizers in memory, by key. `num_evicted` counts those that have left so far."""

    max_bytes: int
    num_evicted: int = 0
    num_bytes: int = 0
    # Sizes by key, the least recently used first.
    _sizes: dict[str, int] = field(default_factory=dict)
    _failures: dict[str, _Failure] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._sizes)

    def used(self, key: str) -> None:
        self._sizes[key] = self._sizes.pop(key)

    def loaded(self, key: str, num_bytes: int) -> list[str]:
        """Add a tokenizer. Return the keys of the tokenizers that must leave to make room."""
        assert key not in self._sizes
        self._failures.pop(key, None)
        self._sizes[key] = num_bytes
        self.num_bytes += num_bytes
        leaving: list[str] = []
        while self.num_bytes > self.max_bytes and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            self.num_bytes -= self._sizes.pop(oldest)
            leaving.append(oldest)
        self.num_evicted += len(leaving)
        return leaving

    def failed(self, key: str, now: float) -> float:
        """Record that a tokenizer could not be loaded, and return when to retry.

        Each wait is twice as long as the one before, up to a limit.
        """
        before = self._failures.pop(key, None)
        num_times = 1 + (before.num_times if before is not None else 0)
        wait_s = min(_FIRST_RETRY_S * 2.0 ** min(num_times - 1, 10), _LONGEST_RETRY_S)
        self._failures[key] = _Failure(num_times, now + wait_s)
        if len(self._failures) > _MAX_FAILURES:
            del self._failures[next(iter(self._failures))]
        return now + wait_s

    def retry_at(self, key: str, now: float) -> float | None:
        """When to retry a tokenizer that could not be loaded. None means now."""
        failure = self._failures.get(key)
        return failure.retry_at if failure is not None and failure.retry_at > now else None

    def check_invariants(self) -> None:
        assert self.num_bytes == sum(self._sizes.values())
        assert self.num_bytes <= self.max_bytes or len(self._sizes) == 1
        assert not set(self._sizes) & set(self._failures)
