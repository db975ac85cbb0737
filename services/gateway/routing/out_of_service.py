"""Instances that the leading master or the health-monitor keeps out of service, as their boards in
the registry say it.

The master's plans respect both. This is for a gateway that ranks by itself while no master answers
(S42): what was decided before the master was lost, or is judged meanwhile, still holds. While the
store is away the last state stands.
"""

from __future__ import annotations

from pdmesh.core.health.fault_levels import EJECTS_FROM, level_of
from pdmesh.events.v1.events_pb2 import FaultReport
from pdmesh.net.nats.board import Board, BoardView
from pdmesh.v1.admin_service_pb2 import HOLD_KIND_DRAIN, HOLD_KIND_ISOLATE, Hold


class KeptOut:
    """No instance is out of service until `watch` has read otherwise."""

    def __init__(self) -> None:
        self._holds: BoardView[Hold] | None = None
        self._faults: BoardView[FaultReport] | None = None

    def watch(self, holds: Board[Hold], faults: Board[FaultReport]) -> None:
        self._holds = holds.watch(lambda _: None)
        self._faults = faults.watch(lambda _: None)

    async def close(self) -> None:
        for view in (self._holds, self._faults):
            if view is not None:
                await view.close()

    def is_isolated(self, instance_id: str) -> bool:
        """It gets no requests, whatever it reports."""
        return self._hold(instance_id) == HOLD_KIND_ISOLATE

    def is_last_resort(self, instance_id: str, incarnation: int) -> bool:
        """It should leave when others can do its work, or is judged faulty.

        It gets only what no other instance can take.
        """
        return self._hold(instance_id) == HOLD_KIND_DRAIN or self._is_faulty(
            instance_id, incarnation
        )

    def _hold(self, instance_id: str) -> int | None:
        found = self._holds.known.get(instance_id) if self._holds is not None else None
        return found.kind if found is not None else None

    def _is_faulty(self, instance_id: str, incarnation: int) -> bool:
        report = self._faults.known.get(instance_id) if self._faults is not None else None
        if report is None or report.instance_incarnation != incarnation or report.held_back:
            return False
        return level_of(report.level) >= EJECTS_FROM
