"""Instance processes with a real NATS server, and a view of the mesh's registry."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdmesh.engine.factory import EngineSettings
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.net.registry import RegistryView
from pdmesh.v1.common_pb2 import ROLE_DECODE, InstanceRecord
from tests.fakes.sim_instances import DECODE, PREFILL, settings_of
from tests.support.sites import servers
from tests.support.waiting import PATIENCE_S, until

ROOT = Path(__file__).resolve().parents[3]
LEASE_S = 4.0  # longer than a busy machine may stall


@dataclass
class Process:
    """One service process. `address` and `settings` are from its record in the registry."""

    child: asyncio.subprocess.Process
    log_file: Path
    address: str
    settings: EngineSettings
    record: InstanceRecord

    def signal(self, number: signal.Signals) -> None:
        self.child.send_signal(number)

    async def exit_code(self, timeout_s: float = PATIENCE_S) -> int:
        async with asyncio.timeout(timeout_s):
            return await self.child.wait()

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(
                f"http://{self.record.ops_address}/health/ready", timeout=60
            ):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def metrics(self) -> str:
        url = f"http://{self.record.ops_address}/metrics"
        with urllib.request.urlopen(url, timeout=60) as response:
            return str(response.read(), "utf-8")


@dataclass
class Site:
    """A NATS server, a view of the registry, and the processes that a test starts."""

    nats_url: str
    bus: NatsBus
    view: RegistryView
    directory: Path
    children: list[asyncio.subprocess.Process]
    server: servers.TestServer

    async def until(self, holds: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        await until(holds, timeout_s)

    async def start(self, service: str, instance_id: str, **env: str) -> Process:
        prefix = f"PDMESH_{service.upper()}_"
        log_file = self.directory / f"{instance_id}.log"
        with log_file.open("ab") as log:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                f"pdmesh.services.{service}",
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "PYTHONPATH": f"{ROOT}:{ROOT / 'libs'}",
                    "PDMESH_NATS_URL": self.nats_url,
                    "PDMESH_ENGINE": "sim",
                    "PDMESH_LOG_FORMAT": "json",
                    "PDMESH_LEASE_S": str(LEASE_S),
                    f"{prefix}INSTANCE_ID": instance_id,
                    **{f"{prefix}{name}": value for name, value in env.items()},
                },
            )
        self.children.append(child)
        known = self.view.records.get(instance_id, InstanceRecord()).incarnation
        await self.until(
            lambda: (
                self.view.records.get(instance_id, InstanceRecord()).incarnation not in (0, known)
            )
        )
        return self.process(child, log_file, self.view.records[instance_id])

    @staticmethod
    def process(
        child: asyncio.subprocess.Process, log_file: Path, record: InstanceRecord
    ) -> Process:
        works = DECODE if record.role == ROLE_DECODE else PREFILL
        settings = settings_of(
            record.instance_id, works, incarnation=record.incarnation, block_size=record.block_size
        )
        return Process(child, log_file, record.grpc_address, settings, record)


@contextlib.asynccontextmanager
async def instance_site(directory: Path) -> AsyncIterator[Site]:
    """A site. The end of the block kills its processes."""
    server = servers.nats(directory)
    await server.start()
    bus = await NatsBus.connect(server.url, "test")
    view = await NatsRegistry(bus, LEASE_S).watch()
    site = Site(server.url, bus, view, directory, [], server)
    try:
        yield site
    finally:
        for child in site.children:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
        await view.close()
        await bus.close()
        server.close()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with instance_site(tmp_path) as site:
        yield site
