"""The interface of the registry, which lists all service processes of the mesh.

Each process has one record, under a lease that the process renews. A record whose lease ends is
removed. `nats/registry.py` implements the registry with JetStream key-value. When another
incarnation (a later process with the same id) replaces a process, the replaced one can no longer
write, because its revision of the record is old. While the store is unreachable, a view keeps its
last records and `is_connected` is False. The instances are not taken for dead then (F18).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from pdmesh.v1.common_pb2 import INSTANCE_PHASE_READY, InstanceRecord


def takes_requests(record: InstanceRecord) -> bool:
    """Whether requests may be sent to this instance (S19).

    It must be loaded, connected to its peers, and not about to leave.
    """
    return record.phase == INSTANCE_PHASE_READY


@dataclass(frozen=True, slots=True)
class RecordChanged:
    """A record that appeared, changed, or was removed.

    `record` is None after a removal. `is_lease_end` says that the lease ended and the process did
    not deregister.
    """

    instance_id: str
    record: InstanceRecord | None
    is_lease_end: bool = False


class RecordLease(Protocol):
    """The lease of a process's own record. It is renewed in the background until `release`."""

    @property
    def is_held(self) -> bool:
        """False if another incarnation has taken the id, or no renewal succeeded for a lease."""
        ...

    @property
    def was_replaced(self) -> bool:
        """Whether another incarnation has taken the id. If so, this process should end.

        The loss of the store alone is no reason to end.
        """
        ...

    async def update(self, record: InstanceRecord) -> None:
        """Replace the record, for example when draining.

        While the store is unreachable, nothing is written. The next renewal writes the record.
        """
        ...

    async def release(self) -> None:
        """Deregister. The record is removed at once."""
        ...


class RegistryView(Protocol):
    """A live copy of all records."""

    @property
    def is_connected(self) -> bool: ...

    @property
    def records(self) -> Mapping[str, InstanceRecord]: ...

    def on_change(self, callback: Callable[[RecordChanged], None]) -> None:
        """Call `callback` on the event loop for each change after the initial load."""
        ...

    async def close(self) -> None: ...


class Registry(Protocol):
    """An id has one owner. A process that registers an id replaces the former owner."""

    async def register(self, record: InstanceRecord) -> RecordLease: ...

    async def watch(self) -> RegistryView:
        """A view that already contains all present records."""
        ...
