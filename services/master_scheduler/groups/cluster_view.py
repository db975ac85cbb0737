"""A master's view of the cluster: instances, assignments, desired state, out-of-service list.

An assignment is the leader's order to one instance, with its role and group. The desired state has
the groups that operators want, and adjustments are the leader's changes to it. A schedule, for
example, adds a group at a given time. This module writes nothing. Every master keeps this view,
because any master may become the leader at any time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from pdmesh.core.groups.adjustments import Adjustments, adjusted, num_lent
from pdmesh.core.groups.cluster_state import InstanceStatus, Observed, wanted_of
from pdmesh.core.groups.desired import Desired
from pdmesh.core.groups.revisions import Upgrades
from pdmesh.core.model import Assignment
from pdmesh.core.placement.fleet import Fleet, OutOfServiceSeen
from pdmesh.errors import InvalidRequest
from pdmesh.instance.incarnation.assignment import assignment_from
from pdmesh.kv.agent import wire
from pdmesh.net.assignments import AssignmentBook, Assignments
from pdmesh.net.nats.desired_store import DesiredStore
from pdmesh.net.registry import RecordChanged, RegistryView
from pdmesh.services.master_scheduler.groups.desired_convert import adjustments_from
from pdmesh.services.master_scheduler.groups.desired_reader import DesiredReader
from pdmesh.services.master_scheduler.groups.group_convert import seen_from
from pdmesh.services.master_scheduler.groups.out_of_service import OutOfServiceBook
from pdmesh.services.master_scheduler.groups.upgrade_convert import upgrades_from
from pdmesh.v1.admin_service_pb2 import LEAVE_MODE_AT_ONCE, LEAVE_MODE_DRAIN, DesiredVersion

log = structlog.get_logger(__name__)

KV_TRANSPORT: Final = f"ucx/{wire.VERSION}"


class ClusterView:
    """Call `open` first. `changed` is set whenever a part of the view may have changed."""

    def __init__(
        self,
        fleet: Fleet,
        registry: RegistryView,
        assignments: Assignments,
        store: DesiredStore,
        out_of_service: OutOfServiceBook,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fleet, self.registry, self.out_of_service = fleet, registry, out_of_service
        self.desired = store.book()
        self.changed = asyncio.Event()
        self._assignments, self._clock = assignments, clock
        self._book: AssignmentBook | None = None
        self._reader = DesiredReader()

    async def open(self) -> None:
        """Follow all parts of the view. Returns when all have been read once."""
        self.registry.on_change(self._on_record)
        self.desired.follow(self.changed.set)
        await self.out_of_service.watch(self._on_out_of_service)
        self._book = await self._assignments.book()
        self._book.on_change(self.changed.set)
        await self.desired.until_loaded()

    async def close(self) -> None:
        await self.desired.close()
        await self.out_of_service.close()
        if self._book is not None:
            await self._book.close()

    @property
    def assignments(self) -> AssignmentBook:
        assert self._book is not None
        return self._book

    @property
    def version(self) -> DesiredVersion | None:
        return self.desired.current

    @property
    def upgrades(self) -> Upgrades:
        """The stored records of upgrades, which every master follows."""
        return upgrades_from(self.desired.upgrades)

    @property
    def fired(self) -> Mapping[str, float]:
        """When each schedule fired last, according to the stored adjustments."""
        return dict(self.desired.adjustments.fired)

    @property
    def current(self) -> tuple[Desired, Adjustments] | None:
        """The operators' desired state, and the leader's adjustments to it.

        None until `read` has read the current version.
        """
        if self.version is None or (desired := self._reader.known(self.version)) is None:
            return None
        return desired, adjustments_from(self.desired.adjustments)

    async def read(self) -> None:
        """Parse the text of the current version. `current` then returns the result."""
        if self.version is not None:
            await self._reader.read(self.version)

    def why_unreadable(self) -> str | None:
        """Why the current version cannot be read.

        Empty if it can be read. None if `read` has not tried it yet, or if there is no version.
        """
        if self.version is None or not self._reader.has_read(self.version):
            return None
        return "" if self._reader.known(self.version) is not None else self._reader.problem

    def is_assigned(self, instance_id: str) -> bool:
        """Whether the instance has an assignment. This is true even while it is restarted."""
        return self._book is not None and instance_id in self._book.known

    def stale(self) -> str:
        """The name of the first part that may be outdated. Empty if all parts are current."""
        are_current = {
            "instances": self.registry.is_connected,
            "assignments": self.assignments.is_current,
            "desired state": self.desired.is_current,
            "instances out of service": self.out_of_service.is_current,
        }
        return next(
            (f"the {what}" for what, is_current in are_current.items() if not is_current), ""
        )

    def observe(self, epoch: int, version: int, desired: Desired) -> Observed:
        """The input of the group controller. `desired` does not include the adjustments."""
        seen: dict[str, InstanceStatus] = {}
        for instance_id, record in self.registry.records.items():
            instance = self.fleet.instances.get(instance_id)
            if each := seen_from(record, instance.used_slots() if instance else 0):
                seen[instance_id] = each
        given: dict[str, Assignment] = {}
        for instance_id, message in self.assignments.known.items():
            try:
                given[instance_id] = assignment_from(message)
            except InvalidRequest as exc:
                log.warning("groups.bad_assignment", instance_id=instance_id, error=exc.message)
        out = self.out_of_service
        to_drain, out_at_once = out.left(LEAVE_MODE_DRAIN), out.left(LEAVE_MODE_AT_ONCE)
        known = adjustments_from(self.desired.adjustments)
        lent = num_lent(desired, known)
        wanted = wanted_of(adjusted(desired, known), KV_TRANSPORT, lent, self.upgrades)
        return Observed(epoch, version, wanted, seen, given, to_drain, out_at_once)

    def _on_record(self, change: RecordChanged) -> None:
        self.changed.set()

    def _on_out_of_service(self) -> None:
        out = self.out_of_service.left(LEAVE_MODE_AT_ONCE)
        self.fleet.handle(OutOfServiceSeen(out), self._clock())
        self.changed.set()
