"""The process of `pdmesh-health-monitor --node`, which is the agent of one machine.

The registry lists this process as `node-agent`.
"""

from __future__ import annotations

import asyncio
import os

import pdmesh
from pdmesh.net.events import EventPublisher
from pdmesh.net.heartbeat import Presence
from pdmesh.net.mesh_link import MeshLink
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.net.tasks import end
from pdmesh.service_process import App
from pdmesh.services.health_monitor.devices import (
    DeviceReader,
    DeviceSource,
    FileDevices,
    NvmlDevices,
)
from pdmesh.services.health_monitor.node_agent import NodeAgent, observe
from pdmesh.services.health_monitor.settings import NodeSettings
from pdmesh.v1.common_pb2 import InstanceRecord

SERVICE = "node-agent"


async def serve(settings: NodeSettings, app: App) -> None:
    bus = await app.unless_stopping(
        NatsBus.connect(settings.nats_url, settings.instance_id, settings.num_nats_replicas)
    )
    registry = NatsRegistry(bus, settings.lease_s)
    view = await app.unless_stopping(registry.watch())
    publisher = EventPublisher(bus, app.instance_id, app.incarnation)
    agent = NodeAgent(
        settings.node,
        DeviceReader(_sources(settings)),
        MeshLink(bus, view, publisher),
        settings.status_file,
        period_s=settings.period_s,
    )
    observe(agent)
    app.pages["node"] = agent.page
    app.add_readiness("told", lambda: agent.status.written_at > 0)
    record = InstanceRecord(
        instance_id=app.instance_id,
        incarnation=app.incarnation,
        service=app.service,
        ops_address=app.ops_address,
        version=pdmesh.__version__,
        pid=os.getpid(),
        node_id=settings.node,
    )
    presence = Presence(
        registry,
        publisher,
        lease_s=settings.lease_s,
        is_ready=lambda: not app.not_ready(),
        on_replaced=app.stopping.set,
    )
    await app.unless_stopping(presence.start(lambda: record))
    running = asyncio.create_task(agent.run(), name="node-agent")
    await app.until_stopping(running)
    await end([running])
    await presence.stop()
    await view.close()
    await bus.close()


def _sources(settings: NodeSettings) -> list[DeviceSource]:
    sources: list[DeviceSource] = [FileDevices(settings.device_files)]
    if (nvml := NvmlDevices.find()) is not None:
        sources.append(nvml)
    return sources
