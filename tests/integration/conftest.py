"""A real NATS server of a test's own, and a connection to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdmesh.net.nats_bus import NatsBus
from tests.support import servers


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
