"""Tests a response that continues an earlier one with an image, and the items that the store keeps
of both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from pdmesh.services.gateway.http.responses import store
from tests.fakes.gateway_mesh import GatewayMesh
from tests.integration.images.image_mesh import image_mesh
from tests.support.images.files import data_uri, png
from tests.support.sites import servers


@pytest_asyncio.fixture
async def mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GatewayMesh]:
    # A busy machine must not look like an outage of Redis.
    monkeypatch.setattr(store, "TIMEOUT_S", 60.0)
    server = servers.valkey(tmp_path)
    await server.start()
    async with image_mesh(tmp_path, redis_url=server.url) as mesh:
        yield mesh
    server.close()


@pytest.mark.req("S128")
async def test_a_response_continues_one_with_an_image(mesh: GatewayMesh) -> None:
    image = {"type": "input_image", "image_url": data_uri(png(1)), "detail": "low"}
    asked = [{"role": "user", "content": [{"type": "input_text", "text": "What?"}, image]}]
    common = {"model": "tiny", "max_output_tokens": 4, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=mesh.url, timeout=120) as client:
        first = await client.post("/v1/responses", json={"input": asked, **common})
        assert first.status_code == 200, first.text
        previous = first.json()["id"]
        body = {"input": "And now?", "previous_response_id": previous, **common}
        second = await client.post("/v1/responses", json=body)
        assert second.status_code == 200, second.text
        listed = await client.get(f"/v1/responses/{second.json()['id']}/input_items")
    assert [len(prefill.images) for prefill in mesh.instances["prefill-0"].prefills] == [1, 1]
    assert mesh.instances["prefill-0"].prefills[-1].images[0].data == png(1)
    parts = [part for item in listed.json()["data"] for part in item["content"]]
    assert image in parts
