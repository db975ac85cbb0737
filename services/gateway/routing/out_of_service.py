"""Instances that an operator cordoned, or that the health-monitor ejected for a fault.

The leading master and the health-monitor each write a board, which is a key-value bucket in NATS.
The master respects both boards when it plans requests. A gateway reads them here, for instances
that it ranks itself because no master answers (S42), and for pooling. So earlier decisions of the
master stay in force, and the health-monitor can still make new ones. While NATS is unreachable, the
last state stays valid.
"""

from __future__ import annotations

from pdmesh.core.health.fault_levels import EJECTS_FROM, level_of
from pdmesh.events.v1.events_pb2 import FaultReport
from pdmesh.net.nats.board import Board, BoardView
from pdmesh.v1.admin_service_pb2 import LEAVE_MODE_AT_ONCE, LEAVE_MODE_DRAIN, OutOfService


class OutOfServiceView:
    """The content of both boards. No instance is out of service until `watch` has read them."""

    def __init__(self) -> None:
        self._out_of_service: BoardView[OutOfService] | None = None
        self._faults: BoardView[FaultReport] | None = None

    def watch(self, out_of_service: Board[OutOfService], faults: Board[FaultReport]) -> None:
        self._out_of_service = out_of_service.watch(lambda _: None)
        self._faults = faults.watch(lambda _: None)

    async def close(self) -> None:
        for view in (self._out_of_service, self._faults):
            if view is not None:
                await view.close()

    def is_out(self, instance_id: str) -> bool:
        """Whether the instance gets no requests."""
        found = self._entry(instance_id)
        return found is not None and found.mode == LEAVE_MODE_AT_ONCE

    def is_avoided(self, instance_id: str, incarnation: int) -> bool:
        """Whether the instance gets a request only if no other instance can take it.

        This applies to a faulty instance, and to an instance that will leave its group once a
        substitute is ready.
        """
        found = self._entry(instance_id)
        is_leaving = found is not None and found.mode == LEAVE_MODE_DRAIN
        return is_leaving or self._is_faulty(instance_id, incarnation)

    def _entry(self, instance_id: str) -> OutOfService | None:
        view = self._out_of_service
        return view.known.get(instance_id) if view is not None else None

    def _is_faulty(self, instance_id: str, incarnation: int) -> bool:
        report = self._faults.known.get(instance_id) if self._faults is not None else None
        if report is None or report.instance_incarnation != incarnation or report.held_back:
            return False
        return level_of(report.level) >= EJECTS_FROM
