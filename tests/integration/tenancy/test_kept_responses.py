"""Tests that a tenant cannot show, continue, cancel or delete the kept responses of another
tenant.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from pdmesh import api_keys
from pdmesh.api_keys import KeyFile
from pdmesh.core.tenancy.tenant import TenantEntry
from pdmesh.services.gateway.access.access_control import KeyedAccess
from tests.fakes.gateway_mesh import gateway_mesh
from tests.support.sites import servers


@pytest.mark.fault("F40")
async def test_another_tenants_response_is_a_404(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    file = KeyFile(tenants={"acme": TenantEntry(), "other": TenantEntry()})
    tokens = {name: api_keys.issue(file, name) for name in file.tenants}
    api_keys.save(path, file)
    valkey = servers.valkey(tmp_path)
    await valkey.start()
    async with (
        gateway_mesh(tmp_path, access=KeyedAccess(path), redis_url=valkey.url) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=60) as http,
    ):

        async def asked(tenant: str, method: str, path: str, **body: object) -> httpx.Response:
            key = {"authorization": f"Bearer {tokens[tenant]}"}
            return await http.request(
                method, f"/v1/responses{path}", headers=key, json=body or None
            )

        body = {"model": "tiny", "input": "secret", "max_output_tokens": 3}
        kept = (await asked("acme", "POST", "", **body)).json()
        assert kept["store"] is True
        name = kept["id"]
        following = body | {"previous_response_id": name}
        for method, path_of, sent in (
            ("GET", f"/{name}", {}),
            ("GET", f"/{name}/input_items", {}),
            ("POST", f"/{name}/cancel", {}),
            ("DELETE", f"/{name}", {}),
            ("POST", "", following),
        ):
            refused = await asked("other", method, path_of, **sent)
            assert refused.status_code == 404, (method, path_of)
            assert refused.json()["error"]["code"] == "response_not_found"
            assert "secret" not in refused.text
        assert (await http.get(f"/v1/responses/{name}")).status_code == 401
        assert (await asked("acme", "GET", f"/{name}")).json() == kept
        assert (await asked("acme", "POST", "", **following)).status_code == 200
    valkey.close()
