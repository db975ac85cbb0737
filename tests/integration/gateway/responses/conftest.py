"""Fixtures with a gateway that keeps responses in a real Valkey."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from pdmesh.services.gateway.http.responses import store
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.support.sites import servers


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow the store more time, so that a busy machine does not look like an outage of Redis."""
    monkeypatch.setattr(store, "TIMEOUT_S", 60.0)


@pytest.fixture
async def valkey(tmp_path: Path) -> AsyncIterator[servers.TestServer]:
    server = servers.valkey(tmp_path)
    await server.start()
    yield server
    server.close()


@pytest.fixture
async def mesh(tmp_path: Path, valkey: servers.TestServer) -> AsyncIterator[GatewayMesh]:
    """Two prefills and two decodes."""
    async with gateway_mesh(tmp_path, num_prefills=2, num_decodes=2, redis_url=valkey.url) as mesh:
        yield mesh


@pytest.fixture
async def client(mesh: GatewayMesh) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{mesh.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client
