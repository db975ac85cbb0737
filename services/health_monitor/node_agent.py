"""The agent of one node (machine). It reads and reports the state of the node's devices (S33).

There are three reports: a status file for the node's instances, the event `NodeReported` for the
health-monitor, and the page `/status/node` for tools. Each report has the state of all devices and
is repeated in each period, so that a lost message does no harm. The agent starts and kills no
process. An instance that must restart ends itself, and the machine's supervisor starts it again
(ADR 18).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import structlog

from pdmesh.atomic_file import write_atomically
from pdmesh.core.health.fault_levels import EJECTS_FROM, Level
from pdmesh.core.health.node_status import (
    DeviceStatus,
    NodeStatus,
    dump,
    signals_for,
)
from pdmesh.events.v1.events_pb2 import NodeReported
from pdmesh.net import subjects
from pdmesh.net.convert.fault_signals import signal_to
from pdmesh.net.mesh_link import MeshLink
from pdmesh.services.health_monitor.devices import DeviceReader
from pdmesh.telemetry import metrics, names

log = structlog.get_logger(__name__)


class NodeAgent:
    def __init__(
        self,
        node_id: str,
        devices: DeviceReader,
        link: MeshLink,
        status_file: Path,
        *,
        period_s: float,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._node_id, self._devices, self._status_file = node_id, devices, status_file
        self._view, self._publisher = link.view, link.publisher
        self._period_s, self._wall_clock = period_s, wall_clock
        self._told: tuple[DeviceStatus, ...] = ()
        self.status = NodeStatus(node_id, 0.0, period_s, ())

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(self._period_s)

    async def step(self) -> None:
        """Read every device once, and report."""
        devices = await self._devices.read()
        self.status = NodeStatus(self._node_id, self._wall_clock(), self._period_s, devices)
        self._log_changes(devices)
        try:
            await asyncio.to_thread(write_atomically, self._status_file, dump(self.status))
        except OSError as exc:  # instances notice the age of the old file
            log.warning("node.file_not_written", path=str(self._status_file), error=exc.strerror)
        await self._publisher.publish(subjects.node_reported(self._node_id), self._report())

    def page(self) -> object:
        """The content of the page `/status/node`."""
        return asdict(self.status)

    def counts(self) -> Iterable[tuple[float, dict[str, str]]]:
        """The numbers of devices, by level."""
        for level in Level:
            num = sum(device.level is level for device in self.status.devices)
            yield float(num), {"level": str(int(level))}

    def _report(self) -> NodeReported:
        status = self.status
        return NodeReported(
            node_id=status.node_id,
            period_s=status.period_s,
            devices=[
                NodeReported.DeviceStatus(
                    device=d.device, level=int(d.level), reason=d.reason, detail=d.detail
                )
                for d in status.devices
            ],
            instances=[
                NodeReported.InstanceSignals(
                    instance_id=record.instance_id,
                    instance_incarnation=record.incarnation,
                    signals=map(signal_to, signals_for(record.devices, status.devices)),
                )
                for _, record in sorted(self._view.records.items())
                if record.node_id == status.node_id and record.devices
            ],
        )

    def _log_changes(self, devices: tuple[DeviceStatus, ...]) -> None:
        before = {device.device: device for device in self._told}
        for device in devices:
            if before.get(device.device, DeviceStatus(device.device)) != device:
                is_bad = device.level >= EJECTS_FROM
                (log.warning if is_bad else log.info)(
                    "node.device", device=device.device, level=int(device.level),
                    reason=device.reason, detail=device.detail,
                )  # fmt: skip
        self._told = devices


def observe(agent: NodeAgent) -> None:
    metrics.gauge(names.NODE_DEVICES, "Devices of the node by level", agent.counts)
