"""Checks whether a mesh over several hosts is whole.

The `Observer` reads the registry, NATS, Redis and the readiness of gateways, and lists all
processes and replicas that are missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Self

import grpc
import httpx
from nats.errors import Error as NatsError
from redis.asyncio import Redis
from redis.exceptions import RedisError

from pdmesh.core.server_urls import SentinelUrl
from pdmesh.launcher.hosts.folder import PRIMARY, host_spec
from pdmesh.launcher.spec import MeshSpec, planned_services
from pdmesh.net.grpc import rpc
from pdmesh.net.nats.buckets import ALL_BUCKETS, INSTANCES
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.net.registry import RegistryView
from pdmesh.v1.common_pb2 import INSTANCE_PHASE_READY
from pdmesh.v1.instance_service_pb2 import GetStatusRequest
from pdmesh.v1.instance_service_pb2_grpc import InstanceServiceStub
from tests.support.hosts.cluster import Cluster
from tests.support.sites import fleet

_INSTANCES = ("prefill", "decode", "instance")


@dataclass
class Observer:
    """Looks at a mesh from outside, with an operator's certificate."""

    cluster: Cluster
    bus: NatsBus
    view: RegistryView

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, cluster: Cluster) -> AsyncIterator[Self]:
        lease_s = float(cluster.env.get("PDMESH_LEASE_S", "3"))
        async with cluster.bus() as bus:
            view = await NatsRegistry(bus, lease_s).watch()
            try:
                yield cls(cluster, bus, view)
            finally:
                await view.close()

    def processes(self) -> dict[str, str]:
        """The service of every process that should run, by the process's name."""
        hosts = self.cluster.layout.hosts
        specs = [host_spec(name, host, MeshSpec()) for name, host in hosts.items()]
        return {each.name: each.service for spec in specs for each in planned_services(spec)}

    def leader(self) -> str:
        """The name of the leading master. Empty if there is none."""
        records = self.view.records
        return next((name for name in records if records[name].is_leader), "")

    async def stream(self, bucket: str = INSTANCES) -> Any:
        """The information of nats-py about the stream of the bucket."""
        return await self.bus.jetstream(2.0).stream_info(f"KV_{bucket}")

    async def primary(self) -> str:
        """The host of Redis' primary according to at least two sentinels. Otherwise empty."""
        said = []
        for host in self.cluster.server_hosts:
            async with self._sentinel(host) as sentinel:
                with contextlib.suppress(RedisError, OSError):
                    found = await sentinel.sentinel_get_master_addr_by_name(PRIMARY)
                    said.append(str(found[0]))
        by_address = {self.cluster.layout.address(h): h for h in self.cluster.server_hosts}
        likely = max(said, key=said.count, default="")
        return by_address.get(likely, "") if said.count(likely) >= 2 else ""

    @contextlib.asynccontextmanager
    async def _sentinel(self, host: str) -> AsyncIterator[Any]:
        url = SentinelUrl.parse(self.cluster.host_folder.redis_url("operator"))
        tls = self.cluster.directory / "hosts/admin/operator"
        connection: Any = Redis(
            host=self.cluster.layout.address(host),
            port=self.cluster.layout.ports.sentinel,
            username=url.username,
            password=url.password,
            ssl=True,
            ssl_certfile=str(tls / "tls.crt"),
            ssl_keyfile=str(tls / "tls.key"),
            ssl_ca_certs=str(tls / "ca.crt"),
            socket_timeout=2,
            socket_connect_timeout=2,
            decode_responses=True,
            driver_info=None,
        )
        try:
            yield connection
        finally:
            await connection.aclose()

    async def lacks(self) -> list[str]:
        """Everything that is missing. Empty if the mesh is whole."""
        return [
            *self._processes_missing(),
            *await self._replicas_missing(),
            *await self._redis_missing(),
            *[line async for line in self._gateways_missing()],
        ]

    def _processes_missing(self) -> list[str]:
        records = self.view.records
        return [
            f"{name} is not ready"
            for name, service in self.processes().items()
            if name not in records
            or (service in _INSTANCES and records[name].phase != INSTANCE_PHASE_READY)
        ]

    async def _replicas_missing(self) -> list[str]:
        wanted = len(self.cluster.server_hosts) - 1
        found: list[str] = []
        for bucket in ALL_BUCKETS:
            try:
                cluster = (await self.stream(bucket)).cluster
            except (NatsError, TimeoutError, OSError) as exc:
                found.append(f"{bucket}: {exc!r}")
                continue
            current = [each for each in cluster.replicas or [] if each.current and not each.offline]
            if not cluster.leader or len(current) != wanted:
                found.append(f"{bucket}: leader {cluster.leader}, {len(current)} current")
        return found

    async def _redis_missing(self) -> list[str]:
        if not (primary := await self.primary()):
            return ["no primary of Redis"]
        wanted = len(self.cluster.server_hosts) - 1
        async with self._sentinel(primary) as sentinel:
            try:
                replicas = await sentinel.sentinel_slaves(PRIMARY)
            except (RedisError, OSError) as exc:
                return [f"sentinel: {exc!r}"]
        follow = [each for each in replicas if each["master-link-status"] == "ok"]
        well = [each for each in follow if not each["is_sdown"] and not each["is_disconnected"]]
        return [] if len(well) == wanted else [f"{len(well)} replicas of Redis follow"]

    async def _gateways_missing(self) -> AsyncIterator[str]:
        async with httpx.AsyncClient(timeout=5) as client:
            for name, host in self.cluster.layout.hosts.items():
                if host.gateways:
                    try:
                        answer = await client.get(f"{self.cluster.url(name)}/health/ready")
                    except httpx.HTTPError as exc:
                        yield f"{name}: {exc!r}"
                        continue
                    if answer.status_code != httpx.codes.OK:
                        yield f"{name}: {answer.text}"

    async def held(self) -> dict[str, str]:
        """The resources that instances still hold for requests, or the error of the call, by
        instance. Empty if all are free.
        """
        token = self.cluster.host_folder.secrets.mesh_token
        found: dict[str, str] = {}
        for name, service in self.processes().items():
            if service in _INSTANCES and name in self.view.records:
                async with rpc.channel_to(self.view.records[name], token) as channel:
                    try:
                        answer = await InstanceServiceStub(channel).GetStatus(
                            GetStatusRequest(), timeout=5
                        )
                    except grpc.aio.AioRpcError as exc:
                        found[name] = str(exc.details())
                        continue
                if rest := fleet.held_of(answer):
                    found[name] = rest
        return found
