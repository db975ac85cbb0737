"""The list of instances out of service: cordoned by an operator, or ejected for a fault.

The list is stored in NATS. All masters read the list, and the leader writes it. If two operators
change an entry at the same time, the second write is refused. `core.health.ejection_cap` decides
which faulty instances are ejected. If an operator puts an instance back, its present fault does not
eject it again, but a new verdict of the health-monitor may.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from pdmesh.core.health.ejection_cap import FleetEjectionCap, TakenOut
from pdmesh.core.health.fault_levels import EJECTS_FROM
from pdmesh.core.placement.fleet import Fleet
from pdmesh.errors import InvalidRequest, NotLeader
from pdmesh.net.nats.board import Board, BoardView
from pdmesh.v1.admin_service_pb2 import (
    LEAVE_MODE_AT_ONCE,
    LEAVE_MODE_DRAIN,
    LEAVE_MODE_UNSPECIFIED,
    LeaveMode,
    OutOfService,
)

log = structlog.get_logger(__name__)


class OutOfServiceBook:
    """Call `watch` first. `leadership` returns whether this process leads now, and its epoch."""

    def __init__(
        self,
        board: Board[OutOfService],
        fleet: Fleet,
        leadership: Callable[[], tuple[bool, int]],
    ) -> None:
        self._board, self._fleet, self._leadership = board, fleet, leadership
        self._view: BoardView[OutOfService] | None = None
        self._cap = FleetEjectionCap()

    async def watch(self, on_change: Callable[[], None]) -> None:
        """Follow the list. Returns when all entries have been read."""
        self._view = self._board.watch(lambda _: on_change(), lambda _: on_change())
        await self._view.loaded.wait()

    async def close(self) -> None:
        if self._view is not None:
            await self._view.close()

    @property
    def is_current(self) -> bool:
        return self._view is not None and self._view.is_current

    @property
    def known(self) -> Sequence[OutOfService]:
        """The entries in order of instance id."""
        known = self._view.known if self._view is not None else {}
        return [known[instance_id] for instance_id in sorted(known)]

    def left(self, mode: LeaveMode.ValueType) -> frozenset[str]:
        """The instances that were taken out of service in this mode."""
        return frozenset(entry.instance_id for entry in self.known if entry.mode == mode)

    def of(self, instance_id: str) -> OutOfService | None:
        return self._view.known.get(instance_id) if self._view is not None else None

    async def take_out(self, entry: OutOfService, epoch: int) -> None:
        """Write the entry. `epoch` is the epoch of the leadership that decided to write it.

        Raises VersionConflict, NotLeader or Unavailable. Raises InvalidRequest if the entry would
        drain an instance that was taken out in the mode AT_ONCE.
        """
        before = self.of(entry.instance_id)
        is_out = before is not None and before.mode == LEAVE_MODE_AT_ONCE
        if before is not None and is_out and entry.mode == LEAVE_MODE_DRAIN:
            what = "ejected" if before.is_ejected else "cordoned"
            raise InvalidRequest(
                f"{entry.instance_id} is {what} ({before.reason}); uncordon it first", field="mode"
            )
        entry.since.GetCurrentTime()
        await self._write(entry, epoch)

    async def put_back(self, instance_id: str, mode: LeaveMode.ValueType, epoch: int) -> str:
        """Put an instance back into service.

        Returns the instance's fault if it is serious enough for ejection, otherwise "". Raises
        InvalidRequest if the instance is not out of service in `mode`, which may be unspecified.
        Also raises VersionConflict, NotLeader or Unavailable.
        """
        entry = self.of(instance_id)
        if entry is None or mode not in (LEAVE_MODE_UNSPECIFIED, entry.mode):
            what = "out of service" if entry is None else "taken out at once"
            what = "being drained" if mode == LEAVE_MODE_DRAIN else what
            raise InvalidRequest(f"{instance_id} is not {what}", field="instance_id")
        view = self._opened()
        self._check_leadership(epoch)
        instance = self._fleet.instances.get(instance_id)
        fault = instance.fault if instance is not None else None
        if fault is not None:
            self._cap.overrule(instance_id, fault)
        revision = await self._board.forget(instance_id, last=view.revision(instance_id))
        view.wrote(instance_id, None, revision)
        return str(fault) if fault is not None and fault.level >= EJECTS_FROM else ""

    async def restore(self, epoch: int) -> None:
        """Rewrite the entries that the bucket has lost (F21).

        Raises VersionConflict, NotLeader or Unavailable.
        """
        view = self._opened()
        for instance_id in sorted(view.missing):
            await self._write(view.known[instance_id], epoch)
            log.warning("out_of_service.restored", instance_id=instance_id)

    async def eject_faulty(self, epoch: int) -> None:
        """Eject instances that must be replaced because of a fault.

        They stay ejected until an operator puts them back.
        """
        out = {
            e.instance_id: TakenOut(e.mode == LEAVE_MODE_DRAIN, e.is_ejected) for e in self.known
        }
        ruled = self._cap.rule({i: each.fault for i, each in self._fleet.instances.items()}, out)
        for instance_id in ruled.over_cap:
            log.error("ejections.too_many", instance_id=instance_id)
        for instance_id, one in ruled.taken_out.items():
            entry = OutOfService(
                instance_id=instance_id,
                mode=LEAVE_MODE_DRAIN if one.is_drain else LEAVE_MODE_AT_ONCE,
                reason=one.reason,
                is_ejected=one.is_ejected,
            )
            await self.take_out(entry, epoch)
            log.warning("group.ejected", instance_id=instance_id, reason=one.reason)

    async def _write(self, entry: OutOfService, epoch: int) -> None:
        view = self._opened()
        self._check_leadership(epoch)
        revision = await self._board.write(
            entry.instance_id, entry, last=view.revision(entry.instance_id)
        )
        view.wrote(entry.instance_id, entry, revision)

    def _opened(self) -> BoardView[OutOfService]:
        assert self._view is not None
        return self._view

    def _check_leadership(self, epoch: int) -> None:
        if self._leadership() != (True, epoch):
            raise NotLeader("this master has just lost the lead; nothing was changed")
