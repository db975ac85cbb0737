"""Which processes exist: one record per service process, under a lease that its owner renews.

The adapter is JetStream key-value (`nats/registry.py`). A record that is not renewed vanishes when
its lease ends; the store's revision fences a replaced owner. When the store is gone, a view keeps
what it last knew and says so (`is_connected`): a silent store does not mean dead instances (F18).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from pdmesh.v1.common_pb2 import INSTANCE_PHASE_READY, InstanceRecord


def takes_requests(record: InstanceRecord) -> bool:
    """Whether a request may be sent to this instance: loaded, connected, and not leaving (S19)."""
    return record.phase == INSTANCE_PHASE_READY


@dataclass(frozen=True, slots=True)
class RecordChanged:
    """A record appeared, changed, or vanished (then `record` is None).

    `is_lease_end` tells expiry from deregistration.
    """

    instance_id: str
    record: InstanceRecord | None
    is_lease_end: bool = False


class RecordLease(Protocol):
    """A lease that a record's owner holds; renewed in the background until `release`."""

    @property
    def is_held(self) -> bool:
        """False once another incarnation takes the id, or no renewal succeeds for a whole lease."""
        ...

    @property
    def was_replaced(self) -> bool:
        """True once another incarnation has taken the id: this process should end.

        Losing the store is no reason to end.
        """
        ...

    async def update(self, record: InstanceRecord) -> None:
        """Replace the record, e.g. when draining.

        While the store is away, the record is not written; the next renewal writes it.
        """
        ...

    async def release(self) -> None:
        """Deregister: the record vanishes at once."""
        ...


class RegistryView(Protocol):
    """A live copy of all records."""

    @property
    def is_connected(self) -> bool: ...

    @property
    def records(self) -> Mapping[str, InstanceRecord]: ...

    def on_change(self, callback: Callable[[RecordChanged], None]) -> None:
        """Called on the event loop for each change after the initial load."""
        ...

    async def close(self) -> None: ...


class Registry(Protocol):
    """One writer per instance id: registering an id replaces its former holder."""

    async def register(self, record: InstanceRecord) -> RecordLease: ...

    async def watch(self) -> RegistryView:
        """A view that already holds what the store knows now."""
        ...
