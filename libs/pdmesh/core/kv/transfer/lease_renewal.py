"""Decides when a receiver renews the tickets of pulls that have not started.

A ticket is the right to pull one prompt's KV from its sender, for the length of a lease. Renewals
are a third of a lease apart. They end at a set time, so that the sender can free the KV even if the
receiver forgets the ticket. `receiver.py` renews the tickets of pulls that run.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.core.deadlines import RENEWALS_PER_LEASE

MAX_KEPT = 4096


@dataclass(slots=True)
class _Kept:
    every_s: float
    next_at: float
    until: float


class LeaseKeeper:
    """The tickets to renew, by id."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, ticket_id: str, lease_s: float, until: float, now: float) -> bool:
        """Renew the ticket until the time `until`, or until `stop_renewing`.

        Returns False and renews nothing if there are too many tickets, or if there is no lease.
        """
        if lease_s <= 0 or (ticket_id not in self._kept and len(self._kept) >= MAX_KEPT):
            return False
        every = lease_s / RENEWALS_PER_LEASE
        self._kept[ticket_id] = _Kept(every, now + every, until)
        return True

    def stop_renewing(self, ticket_id: str) -> None:
        self._kept.pop(ticket_id, None)

    def due(self, now: float) -> tuple[list[str], list[str]]:
        """The tickets to renew now, and those whose `until` has passed since the last call."""
        over = [ticket_id for ticket_id, kept in self._kept.items() if now >= kept.until]
        for ticket_id in over:
            del self._kept[ticket_id]
        due = [ticket_id for ticket_id, kept in self._kept.items() if now >= kept.next_at]
        for ticket_id in due:
            self._kept[ticket_id].next_at = now + self._kept[ticket_id].every_s
        return due, over
