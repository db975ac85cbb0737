"""A fixture with a gateway and fake instances, to which tests send requests with the real openai
client.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh


@pytest.fixture
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayMesh]:
    """Two prefills and two decodes."""
    directory = tmp_path_factory.getbasetemp()
    async with gateway_mesh(directory, num_prefills=2, num_decodes=2) as mesh:
        yield mesh


@pytest.fixture
async def client(mesh: GatewayMesh) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{mesh.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client
