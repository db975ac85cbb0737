"""What each instance should be: one Assignment per instance, from the leading master.

Assignments do not expire, so they outlive the master and the instances. The adapter is JetStream
key-value (`nats/assignments.py`). Each write is compared with the revision that its writer last
saw, and is refused once a leader of a later epoch has written (I7). In addition, an instance
ignores an assignment that is meant for another incarnation or is older than one that it has seen
(`core.instance.lifecycle`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from pdmesh.v1.groups_pb2 import Assignment

OnAssignment = Callable[[Assignment], None]


class AssignmentBook(Protocol):
    """All assignments, as the leading master reads and writes them."""

    @property
    def is_current(self) -> bool:
        """False while the store is away or not fully read: then decide nothing from `known`."""
        ...

    @property
    def known(self) -> Mapping[str, Assignment]:
        """The assignments by instance id; own writes show at once."""
        ...

    def on_change(self, callback: Callable[[], None]) -> None:
        """Called on the event loop after each change by another writer."""
        ...

    async def write(self, assignment: Assignment) -> None:
        """Raises NotLeader, StaleView or Unavailable.

        NotLeader: a leader of a later epoch has written it since. StaleView: one of an equal or
        earlier epoch has.
        """
        ...

    async def forget(self, instance_id: str, epoch: int) -> None:
        """Remove the assignment; raises like `write`. Does nothing if it is absent."""
        ...

    async def close(self) -> None: ...


class AssignmentFeed(Protocol):
    """One instance's assignment, for as long as the instance follows it."""

    async def close(self) -> None: ...


class Assignments(Protocol):
    async def book(self) -> AssignmentBook:
        """A book that holds what the store knows now; waits for the store if it is away."""
        ...

    def follow(self, instance_id: str, on_assignment: OnAssignment) -> AssignmentFeed:
        """Deliver the current assignment, then each change, and all again after an outage.

        The removal of an assignment is not delivered.
        """
        ...


class StaleView(Exception):
    """Another writer changed the assignment since it was last read; read again and decide again."""
