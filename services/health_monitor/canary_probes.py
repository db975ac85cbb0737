"""Probes idle instances with a small request, and reports the results to the fault judge.

The health-monitor sends this request in the same way as a gateway. Only one probe runs at a time. A
refused probe is no sign of a fault. `core.health.canary_probes` decides which instances are probed
next, and which of them a failed probe makes suspect.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import structlog

from pdmesh.core.health.canary_probes import CanaryProbe, CanaryRota, ProbeTarget
from pdmesh.core.model import Role
from pdmesh.net.grpc.canary_call import Canary, CanaryFailed, CanaryRefused
from pdmesh.net.registry import RegistryView
from pdmesh.services.health_monitor.faults import FaultWatch
from pdmesh.telemetry import metrics, names
from pdmesh.v1.common_pb2 import (
    INSTANCE_PHASE_READY,
    INSTANCE_PHASE_UNSPECIFIED,
    ROLE_DECODE,
    ROLE_FUSION,
    ROLE_PREFILL,
    InstanceRecord,
)

log = structlog.get_logger(__name__)

_TIMEOUT_S: Final = 5.0  # the timeout of one probe
_TICK_S: Final = 1.0
_SERVES: Final = (INSTANCE_PHASE_UNSPECIFIED, INSTANCE_PHASE_READY)
_ROLES: Final = {
    ROLE_PREFILL: Role.PREFILL,
    ROLE_DECODE: Role.DECODE,
    ROLE_FUSION: Role.FUSION,
}
_probes = metrics.counter(names.CANARY_PROBES, "Canary requests, by outcome")


class CanaryRunner:
    """Runs the probes. An idle instance is probed every `period_s` s, and as others' partner."""

    def __init__(
        self,
        faults: FaultWatch,
        view: RegistryView,
        monitor_id: str,
        *,
        period_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._faults, self._view, self._monitor_id = faults, view, monitor_id
        self._clock = clock
        self._rota = CanaryRota(period_s)

    async def run(self) -> None:
        """Runs until cancelled."""
        self._view.on_change(lambda c: None if c.record else self._rota.forget(c.instance_id))
        while True:
            probe = self._rota.next(self._idle(), self._clock())
            if probe is not None:
                await self._try(probe)
            self._tell()
            await asyncio.sleep(_TICK_S)

    def _idle(self) -> list[ProbeTarget]:
        records = tuple(self._view.records.values())
        return [s for r in records if self._faults.is_idle(r) and (s := _subject(r)) is not None]

    def _tell(self) -> None:
        """Tell the fault judge again what probes have found, because its signals expire."""
        for record in tuple(self._view.records.values()):
            subject = _subject(record)
            if subject is not None:
                signals = self._rota.signals(subject)
                self._faults.tell("canary", record, signals, 3 * _TIMEOUT_S)

    async def _try(self, probe: CanaryProbe) -> None:
        guilty: list[ProbeTarget] = []
        detail = ""
        try:
            canary = self._canary(probe)
            await canary.send()
        except (CanaryRefused, KeyError):  # an instance is busy or gone
            return
        except CanaryFailed as exc:
            asked = [record.instance_id for record in canary.asked]
            guilty = [s for s in probe.subjects if s.instance_id in asked]
            detail = str(exc)
            log.info("canary.failed", guilty=asked, detail=detail)
        _probes.add(1, {names.ATTR_OUTCOME: "failed" if guilty else "passed"})
        self._rota.ended(probe, guilty, detail, self._clock())

    def _canary(self, probe: CanaryProbe) -> Canary:
        """The request for a probe. Raises KeyError if an instance has gone."""
        records = self._view.records
        decode = None if probe.decode is None else records[probe.decode.instance_id]
        prefill = records[probe.prefill.instance_id]
        return Canary(prefill, decode, self._monitor_id, _TIMEOUT_S)


def _subject(record: InstanceRecord) -> ProbeTarget | None:
    """The instance as a target of probes. None if it does not serve or its role has no probe."""
    role = _ROLES.get(record.role)
    if role is None or record.is_draining or record.phase not in _SERVES:
        return None
    cell = f"{record.group_id}/{record.model_fingerprint}/{record.revision}/{record.kv_region}"
    return ProbeTarget(record.instance_id, record.incarnation, role, cell)
