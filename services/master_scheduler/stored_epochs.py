"""Finds the highest epoch in the stored assignments, adjustments and upgrades.

An epoch is the number of a leadership. The stores refuse a write from an earlier epoch than the
stored one (I7). So a leader with a lower epoch could not write. After a restart of the whole mesh,
only the stored data tells how high the epochs were (F21).
"""

from __future__ import annotations

from pdmesh.net.assignments import Assignments
from pdmesh.net.nats.desired_store import DesiredStore


async def highest_stored(assignments: Assignments, store: DesiredStore) -> int:
    """The highest epoch, or 0 if nothing was ever written. Waits while NATS is unreachable."""
    book = await assignments.book()
    desired = store.book()
    desired.follow(lambda: None)
    try:
        await desired.until_loaded()
        assigned = (each.epoch for each in book.known.values())
        return max(desired.adjustments.epoch, desired.upgrades.epoch, *assigned)
    finally:
        await desired.close()
        await book.close()
