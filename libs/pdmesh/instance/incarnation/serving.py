"""Serves requests with a loaded engine: runs the host, its gRPC server and its publishers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import grpc

from pdmesh.core.kv.tier import Tier
from pdmesh.engine.base import BlocksChanged
from pdmesh.instance.incarnation.loading import LoadedEngine
from pdmesh.instance.legs import gauges
from pdmesh.instance.legs.host import HostConfig, HostReports, InstanceHost
from pdmesh.instance.legs.leg_life import PullLimits
from pdmesh.instance.legs.publishing import ErrorPublisher, KvBlocksPublisher, LoadPublisher
from pdmesh.instance.legs.servicer import InstanceServicer
from pdmesh.instance.settings import InstanceSettings
from pdmesh.net.addresses import join
from pdmesh.net.events import EventPublisher
from pdmesh.net.grpc import rpc
from pdmesh.net.registry import Registry
from pdmesh.net.tasks import end
from pdmesh.service_process import StartupError
from pdmesh.v1 import instance_service_pb2
from pdmesh.v1.common_pb2 import InstanceRecord

_CLOSE_S: Final = 1.0  # time for sessions to read their last message


class Serving:
    """Serves with one engine. It refuses requests until `admit`.

    `record` makes the instance's present registry record. `on_record` is called when the record has
    changed.
    """

    def __init__(
        self,
        loaded: LoadedEngine,
        events: EventPublisher,
        service: str,
        record: Callable[[], InstanceRecord],
        on_record: Callable[[], None],
    ) -> None:
        settings = loaded.settings
        self.loaded = loaded
        self._settings, self._record = settings, record
        self._blocks = KvBlocksPublisher(events, settings.instance_id)
        self._failures = ErrorPublisher(events, settings.instance_id, service)
        self.host = InstanceHost(
            loaded.engine,
            loaded.admission(),
            time.monotonic,
            HostConfig(
                PullLimits(settings.transfer_timeout_s, settings.transfer_stall_s),
                stall_s=settings.stall_s,
            ),
            HostReports(self._blocks.add, self._failures.report, on_record),
        )
        self._load = LoadPublisher(events, settings.instance_id, self.host.load, self.host.book)
        self.host.on_load = self._load.changed
        self.host.drain(True)
        self._server: grpc.aio.Server | None = None
        self._works: dict[str, asyncio.Task[None]] = {}
        self.address = ""

    async def start(self, registry: Registry) -> list[asyncio.Task[None]]:
        """Listen, and start the tasks that must run as long as this serves. Raises StartupError."""
        self._server = rpc.server()
        rpc.add_service(
            self._server,
            instance_service_pb2.DESCRIPTOR.services_by_name["InstanceService"],
            InstanceServicer(self.host, self._record, self._blocks, self.loaded.text.files),
        )
        self.address = join(self._settings.reachable_host, _listen(self._server, self._settings))
        await rpc.start(self._server)  # may be cancelled, if the master withdraws the assignment
        gauges.show(self.host, self._settings.scenario, self.loaded.info.model)
        works = {
            "outputs": self.host.run(),
            "progress": self.host.tell_progress(),
            "blocks": self._blocks.run(),
            "load": self._load.run(),
            "failures": self._failures.run(),
        }
        if self.loaded.holders is not None:
            works["holders"] = self.loaded.holders.run(registry)
        self._works = {name: asyncio.create_task(work, name=name) for name, work in works.items()}
        return list(self._works.values())

    def admit(self) -> None:
        self.host.drain(False)

    def refuse(self) -> None:
        """Refuse new requests. Running requests continue."""
        self.host.drain(True)

    async def erase_blocks(self) -> None:
        """Publish that this instance holds no blocks any more, for all prefix indexes."""
        await self._quiesce()
        for tier in (Tier.ENGINE, Tier.HOST):
            self._blocks.add(BlocksChanged(is_cleared=True, tier=tier))
        await self._blocks.publish_rest()

    async def stop(self) -> None:
        """End all sessions and free the engine's memory. Nothing is published afterwards."""
        await self._quiesce()
        await self._failures.publish_rest()
        self.host.close_all()
        if self._server is not None:
            await self._server.stop(_CLOSE_S)
        gauges.show(None)
        await self.loaded.stop()

    async def _quiesce(self) -> None:
        await end(self._works.values())


def _listen(server: grpc.aio.Server, settings: InstanceSettings) -> int:
    try:
        return rpc.listen(server, join(settings.inner_host, settings.grpc_port))
    except RuntimeError as exc:
        variable = f"{type(settings).model_config.get('env_prefix', '')}GRPC_PORT"
        raise StartupError(
            f"cannot listen on {settings.inner_host}:{settings.grpc_port}; set {variable}"
        ) from exc
