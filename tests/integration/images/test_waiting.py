"""Tests a request with images that waits for a slot. The gateway must send the images once, and not
with each attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from pdmesh.v1.instance_service_pb2 import REJECT_REASON_BUSY
from tests.fakes.gateway_mesh import GatewayMesh
from tests.integration.images.image_mesh import image_mesh
from tests.support.images.files import data_uri, png
from tests.support.waiting import until


@pytest_asyncio.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[GatewayMesh]:
    async with image_mesh(tmp_path, ttft_s=60.0, retry_s=0.02) as mesh:
        yield mesh


async def ask(mesh: GatewayMesh, *parts: dict[str, Any]) -> httpx.Response:
    content = [{"type": "text", "text": "What?"}, *parts]
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 4,
        "ignore_eos": True,
    }  # fmt: skip
    async with httpx.AsyncClient(base_url=mesh.url, timeout=60) as client:
        return await client.post("/v1/chat/completions", json=body)


@pytest.mark.req("S41", "S128")
async def test_images_are_not_sent_again_to_an_instance_that_is_full(mesh: GatewayMesh) -> None:
    prefill = mesh.instances["prefill-0"]
    prefill.reject_with = REJECT_REASON_BUSY
    image = {"type": "image_url", "image_url": {"url": data_uri(png(1))}}
    waiting = asyncio.create_task(ask(mesh, image))
    await until(lambda: prefill.num_rejected == 1)
    others = asyncio.create_task(ask(mesh))
    # Only the request without images makes these attempts.
    await until(lambda: prefill.num_rejected > 3)
    with_images = [p for p in prefill.prefills if p.images]
    assert not waiting.done()
    assert len(with_images) <= 1
    prefill.free_slots(4)
    for answer in (await waiting, await others):
        assert answer.status_code == 200, answer.text
    sent = [p for p in prefill.prefills if p.images]
    assert len(sent) - len(with_images) == 1
    assert sent[-1].images[0].data == png(1)
