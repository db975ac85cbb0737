"""Fixtures for all integration tests: a real NATS server for one test, a connection to this server,
and transports for KV. After each test, a fixture disarms the test's failpoints.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from pdmesh import failpoints
from pdmesh.kv.transport.ucx import UcxTransport
from pdmesh.net.nats.bus import NatsBus
from tests.fakes.kv.memory_transport import MemoryTransport
from tests.support.sites import servers
from tests.support.sites.sim_pair import MakeTransport


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[servers.TestServer]:
    server = servers.nats(tmp_path)
    await server.start()
    yield server
    server.close()


@pytest.fixture
async def bus(server: servers.TestServer) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(server.url, "test")
    yield bus
    await bus.close()


@pytest.fixture(params=["memory", "ucx"])
def make_transport(request: pytest.FixtureRequest) -> MakeTransport:
    return MemoryTransport if request.param == "memory" else UcxTransport


@pytest.fixture(autouse=True)
def _no_failpoints_left() -> Iterator[None]:
    yield
    failpoints.arm("")
