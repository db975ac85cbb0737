"""Fixtures for the tests of the operators' page. One mesh of simulated engines, with operators'
keys, and one browser serve all tests of a module.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from pdmesh import api_keys
from pdmesh.api_keys import KeyFile
from pdmesh.core.access.operator_roles import ROLES
from pdmesh.launcher.mesh import Mesh
from pdmesh.net.nats.bus import NatsBus
from pdmesh.v1.common_pb2 import ROLE_DECODE
from tests.support.browser.chromium import chromium, program
from tests.support.sites.groups import spec
from tests.support.sites.operator import Operator
from tests.support.waiting import PATIENCE_S

GROUPS = "groups:\n  chat: {scenario: default, prefill: 2, decode: 2}\n"


@dataclass(frozen=True)
class PagedMesh:
    """A mesh with a page. `keys` holds one operator's key for each role."""

    mesh: Mesh
    bus: NatsBus
    operator: Operator
    keys: dict[str, str]

    @property
    def url(self) -> str:
        return f"http://{self.mesh.ops_address('master-scheduler')}/"

    async def decodes(self) -> list[str]:
        states = await self.operator.groups()
        return [m.instance_id for m in states.groups[0].members if m.role == ROLE_DECODE]


def keys_of_operators(path: Path) -> dict[str, str]:
    file = KeyFile()
    keys = {name: api_keys.issue(file, name, role=role) for name, role in ROLES.items()}
    api_keys.save(path, file)
    return keys


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def paged(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PagedMesh]:
    program()  # without a browser, this ends before the mesh starts
    folder = tmp_path_factory.mktemp("page")
    (folder / "groups.yaml").write_text(GROUPS)
    keys = keys_of_operators(folder / "keys.json")
    # Only the master gets the key file. The gateways accept clients without keys.
    env = {"master-scheduler": {"PDMESH_MASTER_SCHEDULER_KEYS_FILE": str(folder / "keys.json")}}
    wanted = replace(spec(folder / "groups.yaml", num_blank=6), service_env=env)
    async with Mesh(wanted, folder / "mesh") as mesh:
        bus = await NatsBus.connect(mesh.nats_url, "test-page")
        operator = Operator(bus)
        await operator.until_serving(2, 2)
        yield PagedMesh(mesh, bus, operator, keys)
        await bus.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    expect.set_options(timeout=1000 * PATIENCE_S)
    async with chromium() as running:
        yield running


async def asked_of(paged: PagedMesh, method: str) -> Any:
    """The answer of the admin API as JSON, in the form that the page gets."""
    headers = {"authorization": f"Bearer {paged.keys['admin']}"}
    async with httpx.AsyncClient(timeout=PATIENCE_S, headers=headers) as client:
        answer = await client.post(f"{paged.url}admin/{method}", json={})
        assert answer.status_code == 200, answer.text
        return answer.json()


async def log_in(page: Page, key: str, role: str) -> None:
    """Log in with the key, and wait until the page shows the key's role."""
    await page.get_by_label("Token").fill(key)
    await page.get_by_label("Token").press("Enter")
    await expect(page.locator("#who")).to_contain_text(role)
