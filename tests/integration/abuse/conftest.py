"""Starts one mesh of simulated engines, which all tests of this package attack."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from pdmesh.launcher.mesh import Mesh
from tests.support.attack.abuse import (
    INCOMING,
    PER_IP,
    RECEIVE_S,
    WRITE_S,
    gauge,
    longest_honest_hold_s,
)
from tests.support.sites import fleet


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    spec = fleet.one_by_one(
        PDMESH_PREFILL_NUM_SLOTS="64",
        PDMESH_DECODE_NUM_SLOTS="64",
        PDMESH_GATEWAY_RECEIVE_TIMEOUT_S=str(RECEIVE_S),
        PDMESH_GATEWAY_WRITE_TIMEOUT_S=str(WRITE_S),
        PDMESH_GATEWAY_MAX_CONNECTIONS_PER_IP=str(PER_IP),
        PDMESH_GATEWAY_MAX_INCOMING_BYTES=str(INCOMING),
        PDMESH_LOOP_WATCH_S="0.005",  # F31 bounds how long a request may hold the gateway's loop
    )
    async with Mesh(spec, tmp_path_factory.mktemp("mesh")) as running:
        yield running


@pytest_asyncio.fixture(autouse=True, loop_scope="package")
async def the_loop_is_not_held(mesh: Mesh) -> AsyncIterator[None]:
    """Check after each test that nothing held the gateway's event loop more than ten times as long
    as the longest honest request does.
    """
    gauge(mesh, "pdmesh_process_loop_held")  # reading the gauge resets it
    yield
    held_s = gauge(mesh, "pdmesh_process_loop_held")
    honest_s = [await longest_honest_hold_s(mesh)]
    while held_s > 10 * max(honest_s) and len(honest_s) < 3:
        honest_s.append(await longest_honest_hold_s(mesh))
    print(
        f"the loop was held for {held_s * 1e3:.1f} ms, by an honest request "
        f"{max(honest_s) * 1e3:.1f}"
    )
    assert held_s <= 10 * max(honest_s)
