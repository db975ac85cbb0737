"""Which tickets a receiver renews, and when: while it waits for its turn to pull, and while it pulls.

Renewals are a third of a lease apart and end by themselves, so that a receiver that forgets a ticket frees it.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_KEPT = 4096
_PER_LEASE = 3


@dataclass(slots=True)
class _Kept:
    every_s: float
    next_at: float
    until: float


class LeaseKeeper:
    """By key: a ticket's id while it waits, a pull's while it runs."""

    def __init__(self) -> None:
        self._kept: dict[str | int, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: str | int, lease_s: float, until: float, now: float) -> bool:
        """Renew until `until` or `let_go`. False at the bound, or without a lease: it does with what it has."""
        if lease_s <= 0 or (key not in self._kept and len(self._kept) >= MAX_KEPT):
            return False
        every = lease_s / _PER_LEASE
        self._kept[key] = _Kept(every, now + every, until)
        return True

    def let_go(self, key: str | int) -> None:
        self._kept.pop(key, None)

    def due(self, now: float) -> tuple[list[str | int], list[str | int]]:
        """What to renew now, and what was kept until now and is no longer."""
        over = [key for key, kept in self._kept.items() if now >= kept.until]
        for key in over:
            del self._kept[key]
        due = [key for key, kept in self._kept.items() if now >= kept.next_at]
        for key in due:
            self._kept[key].next_at = now + self._kept[key].every_s
        return due, over
