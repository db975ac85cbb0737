"""Publishes an event for each group whose members changed, while this master leads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdmesh.core.groups.membership_changes import GroupTracker
from pdmesh.core.placement.fleet import Fleet
from pdmesh.events.v1.events_pb2 import GroupChanged
from pdmesh.net import subjects
from pdmesh.net.events import EventPublisher


class GroupAnnouncer:
    """Call `wake` after each change. `is_leader` returns whether this process may publish."""

    def __init__(
        self,
        fleet: Fleet,
        groups: GroupTracker,
        publisher: EventPublisher,
        is_leader: Callable[[], bool],
    ) -> None:
        self._fleet, self._groups = fleet, groups
        self._publisher, self._is_leader = publisher, is_leader
        self._has_changed = asyncio.Event()

    def wake(self) -> None:
        """Look for changed groups soon.

        Call this also when this master begins to lead, so that it announces the present groups.
        """
        self._has_changed.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await self._has_changed.wait()
            self._has_changed.clear()
            if not self._is_leader():
                continue
            for change in self._groups.observe(self._fleet.instances.values()):
                await self._publisher.publish(
                    subjects.group_changed(change.group_id),
                    GroupChanged(
                        group_id=change.group_id,
                        scenario=change.scenario,
                        prefill_ids=change.prefill_ids,
                        decode_ids=change.decode_ids,
                        fusion_ids=change.fusion_ids,
                        pooling_ids=change.pooling_ids,
                        encoder_ids=change.encoder_ids,
                    ),
                )
