"""The process that judges which processes are alive and which instances are faulty.

With `--node` it is the agent of one machine instead (`node_main`).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Final

import pdmesh
from pdmesh.core.health.liveness import Health
from pdmesh.net.events import EventPublisher
from pdmesh.net.heartbeat import Presence
from pdmesh.net.mesh_link import MeshLink
from pdmesh.net.nats.board import fault_board, health_board, out_of_service_board
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.net.tasks import end, together
from pdmesh.service_process import App, run
from pdmesh.services.health_monitor import node_main
from pdmesh.services.health_monitor.canary_probes import CanaryRunner
from pdmesh.services.health_monitor.faults import FaultWatch, observe
from pdmesh.services.health_monitor.monitor import HealthMonitor
from pdmesh.services.health_monitor.settings import NodeSettings, Settings
from pdmesh.telemetry import metrics, names
from pdmesh.v1.common_pb2 import InstanceRecord

NODE_FLAG: Final = "--node"
_NODE_HELP: Final = (
    f"\nWith {NODE_FLAG} it is the agent of one machine instead: {NODE_FLAG} --help lists its "
    "settings."
)


async def serve(settings: Settings, app: App) -> None:
    bus = await app.unless_stopping(
        NatsBus.connect(settings.nats_url, settings.instance_id, settings.num_nats_replicas)
    )
    registry = NatsRegistry(bus, settings.lease_s)
    view = await app.unless_stopping(registry.watch())
    publisher = EventPublisher(bus, app.instance_id, app.incarnation)
    link = MeshLink(bus, view, publisher)
    monitor = HealthMonitor(
        link, health_board(bus), lease_s=settings.lease_s, forget_s=settings.forget_s
    )
    faults = FaultWatch(link, fault_board(bus), out_of_service_board(bus), lease_s=settings.lease_s)
    canary = CanaryRunner(faults, view, app.instance_id, period_s=settings.canary_period_s)
    _observe(monitor)
    observe(faults)
    app.pages["faults"] = faults.page
    app.add_readiness("watching", lambda: True)
    presence = Presence(
        registry,
        publisher,
        lease_s=settings.lease_s,
        is_ready=lambda: not app.not_ready(),
        on_replaced=app.stopping.set,
    )
    record = InstanceRecord(
        instance_id=app.instance_id,
        incarnation=app.incarnation,
        service=app.service,
        ops_address=app.ops_address,
        version=pdmesh.__version__,
        pid=os.getpid(),
    )
    await app.unless_stopping(presence.start(lambda: record))
    work = together(monitor.run(), faults.run(), canary.run())
    running = asyncio.create_task(work, name="health-monitor")
    await app.until_stopping(running)  # if a part fails, the process ends and is restarted
    await end([running])
    await presence.stop()
    await view.close()
    await bus.close()


def _observe(monitor: HealthMonitor) -> None:
    def states() -> Iterable[tuple[float, dict[str, str]]]:
        counts = Counter(monitor.tracker.healths().values())
        return [(float(counts[health]), {"health": health.value}) for health in Health]

    metrics.gauge(names.HEALTH_STATES, "Processes by health", states)


def main() -> None:
    """Run the health-monitor or, with `--node`, the agent of one machine."""
    if NODE_FLAG in sys.argv[1:]:
        sys.argv.remove(NODE_FLAG)
        run(node_main.SERVICE, NodeSettings, node_main.serve)
    else:
        run("health-monitor", Settings, serve, help_note=_NODE_HELP)


if __name__ == "__main__":
    main()
