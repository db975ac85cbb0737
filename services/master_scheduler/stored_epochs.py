"""The highest epoch in the stored assignments, adjustments and upgrades. A leader with a lower one
could not write them (I7).

The stored epochs outlive all processes: after a restart of the whole mesh, nothing else remembers
an epoch above the store's revisions (F21).
"""

from __future__ import annotations

from pdmesh.net.assignments import Assignments
from pdmesh.net.nats.desired_store import DesiredStore


async def highest_stored(assignments: Assignments, store: DesiredStore) -> int:
    """0 if nothing was ever written. Waits for the store if it is away."""
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
