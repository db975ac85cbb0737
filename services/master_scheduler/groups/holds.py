"""The instances that operators or faults hold out of service, as the leading master reads and
writes them.

Each write is compared with what was last seen, so that of two people who change a hold one is told.
All faults together may hold no more than a share of the fleet: a fault signal that is wrong
everywhere must not empty it bit by bit. A person who lifts a hold overrules the fault that it was
for: the health-monitor hears of it and judges anew. What it finds then may hold the instance again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import structlog

from pdmesh.core.health.fault_levels import EJECTS_FROM, RESPONSES, Level
from pdmesh.core.placement.fleet import Fleet
from pdmesh.core.placement.instance import FaultJudged, Instance
from pdmesh.errors import InvalidRequest, NotLeader
from pdmesh.net.nats.board import Board, BoardView
from pdmesh.v1.admin_service_pb2 import HOLD_KIND_DRAIN, HOLD_KIND_ISOLATE, Hold, HoldKind

log = structlog.get_logger(__name__)

AUTOMATIC_SHARE: Final = 0.2  # of all instances, that faults may hold


class Holds:
    """Opened with `watch`. `leadership` returns (whether this process leads, its epoch) now."""

    def __init__(
        self, board: Board[Hold], fleet: Fleet, leadership: Callable[[], tuple[bool, int]]
    ) -> None:
        self._board, self._fleet, self._leadership = board, fleet, leadership
        self._view: BoardView[Hold] | None = None
        self._refused: set[str] = set()  # faulty instances that were too many to hold, told once
        self._healed: dict[str, FaultJudged] = {}  # faults whose holds were lifted

    async def watch(self, on_change: Callable[[], None]) -> None:
        """Returns when all of them are known."""
        self._view = self._board.watch(lambda _: on_change(), lambda _: on_change())
        await self._view.loaded.wait()

    async def close(self) -> None:
        if self._view is not None:
            await self._view.close()

    @property
    def is_current(self) -> bool:
        return self._view is not None and self._view.is_current

    @property
    def known(self) -> Sequence[Hold]:
        """By instance id."""
        known = self._view.known if self._view is not None else {}
        return [known[instance_id] for instance_id in sorted(known)]

    def held(self, kind: HoldKind.ValueType) -> frozenset[str]:
        return frozenset(hold.instance_id for hold in self.known if hold.kind == kind)

    def of(self, instance_id: str) -> Hold | None:
        return self._view.known.get(instance_id) if self._view is not None else None

    async def hold(self, hold: Hold, epoch: int) -> None:
        """`epoch` of the leadership in which it was decided.

        Raises InvalidRequest where an isolated one is to be drained; VersionConflict, NotLeader,
        Unavailable.
        """
        before = self.of(hold.instance_id)
        if before is not None and before.kind == HOLD_KIND_ISOLATE and hold.kind == HOLD_KIND_DRAIN:
            raise InvalidRequest(
                f"{hold.instance_id} is isolated ({before.reason}); heal it first", field="kind"
            )
        hold.since.GetCurrentTime()
        await self._write(hold, epoch)

    async def release(self, instance_id: str, kind: HoldKind.ValueType, epoch: int) -> str:
        """The fault that is held against it now, empty: none.

        Raises InvalidRequest if no such hold stands; else as `hold`.
        """
        hold = self.of(instance_id)
        if hold is None or hold.kind != kind:
            what = "drained" if kind == HOLD_KIND_DRAIN else "isolated"
            raise InvalidRequest(f"{instance_id} is not {what}", field="instance_id")
        view = self._opened()
        self._check_leadership(epoch)
        instance = self._fleet.instances.get(instance_id)
        fault = instance.fault if instance is not None else None
        if fault is not None:
            self._healed[instance_id] = fault
        revision = await self._board.forget(instance_id, last=view.revision(instance_id))
        view.wrote(instance_id, None, revision)
        return _told(fault) if fault is not None and fault.level >= EJECTS_FROM else ""

    async def restore(self, epoch: int) -> None:
        """Write again what was wiped from the bucket (F21). Raises as `hold`."""
        view = self._opened()
        for instance_id in sorted(view.missing):
            await self._write(view.known[instance_id], epoch)
            log.warning("holds.restored", instance_id=instance_id)

    async def hold_faulty(self, epoch: int) -> None:
        """Hold instances that must be replaced for a fault, until an operator heals them.

        What they report of themselves does not count.
        """
        instances = self._fleet.instances
        self._healed = {
            i: fault
            for i, fault in self._healed.items()
            if i in instances and instances[i].fault == fault
        }
        faulty = {
            i: each
            for i, each in sorted(instances.items())
            if _is_faulty(each) and i not in self._healed
        }
        self._refused &= faulty.keys()
        for instance_id, instance in faulty.items():
            before, hold = self.of(instance_id), _hold_of(instance)
            if before is not None and (before.kind, hold.kind) != (
                HOLD_KIND_DRAIN,
                HOLD_KIND_ISOLATE,
            ):
                continue  # as far out as it has to be
            if before is not None:
                hold.is_automatic = before.is_automatic
            elif not self._has_room(instance_id):
                continue
            await self.hold(hold, epoch)
            log.warning("group.held", instance_id=instance_id, reason=hold.reason)

    def _has_room(self, instance_id: str) -> bool:
        num_held = sum(hold.is_automatic for hold in self.known)
        if num_held < max(1, int(AUTOMATIC_SHARE * len(self._fleet.instances))):
            return True
        if instance_id not in self._refused:
            self._refused.add(instance_id)
            log.error("holds.too_many", instance_id=instance_id, num_held=num_held)
        return False

    async def _write(self, hold: Hold, epoch: int) -> None:
        view = self._opened()
        self._check_leadership(epoch)
        revision = await self._board.write(
            hold.instance_id, hold, last=view.revision(hold.instance_id)
        )
        view.wrote(hold.instance_id, hold, revision)

    def _opened(self) -> BoardView[Hold]:
        assert self._view is not None
        return self._view

    def _check_leadership(self, epoch: int) -> None:
        if self._leadership() != (True, epoch):
            raise NotLeader("this master has just ceased to lead; nothing was changed")


def _is_faulty(instance: Instance) -> bool:
    fault = instance.fault
    return fault is not None and fault.level >= Level.INSTANCE and not fault.held_back


def _hold_of(instance: Instance) -> Hold:
    fault = instance.fault
    assert fault is not None
    finishes = RESPONSES[fault.level].finishes_running
    return Hold(
        instance_id=instance.id,
        kind=HOLD_KIND_DRAIN if finishes else HOLD_KIND_ISOLATE,
        reason=_told(fault),
        is_automatic=True,
    )


def _told(fault: FaultJudged) -> str:
    return f"fault level {fault.level:d}: {', '.join(fault.reasons)}"
