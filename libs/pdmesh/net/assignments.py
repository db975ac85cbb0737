"""The interface for assignments, the leading master's orders to the instances.

An assignment is for one instance. It names the instance's role, its stage (how far it may go, such
as to load or to serve) and its peers. Assignments do not expire, so they outlive the master and the
instances. `nats/assignments.py` stores them in JetStream key-value. A write succeeds only if
its writer has seen the latest revision, and fails once a leader of a later epoch (the number of a
leadership) has written (I7). An instance ignores assignments for other incarnations, and
assignments that are older than one that it has seen (`core.instance.lifecycle`).
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
        """Whether `known` is up to date.

        False while the store is unreachable or not fully read. Do not decide from `known` then.
        """
        ...

    @property
    def known(self) -> Mapping[str, Assignment]:
        """The assignments by instance id. Writes of this process are visible at once."""
        ...

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the event loop after each change by another writer."""
        ...

    async def write(self, assignment: Assignment) -> None:
        """Write the assignment of one instance.

        If another writer has written the assignment since the last read, this raises NotLeader if
        that writer's epoch is later, and StaleView otherwise. Raises Unavailable if the store does
        not answer.
        """
        ...

    async def forget(self, instance_id: str, epoch: int) -> None:
        """Remove the assignment, if there is one. Raises the same errors as `write`."""
        ...

    async def close(self) -> None: ...


class AssignmentFeed(Protocol):
    """A subscription to one instance's assignment, until `close`."""

    async def close(self) -> None: ...


class Assignments(Protocol):
    async def book(self) -> AssignmentBook:
        """A book with all assignments of the store. Waits if the store is unreachable."""
        ...

    def follow(self, instance_id: str, on_assignment: OnAssignment) -> AssignmentFeed:
        """Deliver the current assignment, then each change.

        After an outage, the current assignment is delivered again. A removal is not delivered.
        """
        ...


class StaleView(Exception):
    """Another writer has changed the assignment since the last read.

    Read it again before you decide.
    """
