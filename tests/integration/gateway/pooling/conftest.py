"""A fixture with one gateway, one prefill, one decode and two simulated pooling instances, which
turn texts into vectors.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.fakes.pooling_instances import PoolingSite, pooling_instance


@pytest.fixture
async def sites() -> AsyncIterator[list[PoolingSite]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(pooling_instance(f"pooling-{i}")) for i in range(2)]


@pytest.fixture
async def mesh(
    tmp_path_factory: pytest.TempPathFactory, sites: list[PoolingSite]
) -> AsyncIterator[GatewayMesh]:
    async with gateway_mesh(tmp_path_factory.getbasetemp()) as mesh:
        for site in sites:
            mesh.register(site.record)
        yield mesh


@pytest.fixture
async def http(mesh: GatewayMesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=60) as client:
        yield client
