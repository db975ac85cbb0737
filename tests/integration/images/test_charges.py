"""Tests that a tenant without tokens is refused before the gateway does any work on its images."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdmesh.core.tenancy.limits import ANYONE
from pdmesh.services.gateway.access.access_control import OpenAccess, RateLimited
from tests.integration.images.image_mesh import image_mesh
from tests.support.images.files import data_uri, png

BAD = b"no image"
CHAT = [{"type": "image_url", "image_url": {"url": data_uri(BAD)}}]
SOURCE = {"type": "base64", "data": base64.b64encode(BAD).decode()}
BLOCKS = [{"type": "image", "source": SOURCE}]
PARTS = [{"type": "input_image", "image_url": data_uri(BAD)}]
DOORS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": CHAT}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": BLOCKS}], "max_tokens": 4}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": BLOCKS}]}),
    ("/v1/responses", {"input": [{"role": "user", "content": PARTS}]}),
    ("/tokenize", {"messages": [{"role": "user", "content": CHAT}]}),
]


class Purse(OpenAccess):
    """An access control that grants `num_left` tokens. `num_charged` is the number of tokens
    charged for the running call.
    """

    def __init__(self, num_left: int) -> None:
        self.num_left, self.num_charged = num_left, 0
        self.tenant = ANYONE

    async def enter(self, authorization: str) -> Purse:
        return self

    def charge(self, num_tokens: int) -> None:
        assert not self.num_charged, "a call is charged once at a time"
        if num_tokens > self.num_left:
            raise RateLimited("no tokens left", reason="INSUFFICIENT_QUOTA")
        self.num_left -= num_tokens
        self.num_charged = num_tokens

    async def has_more(self) -> bool:
        return False

    def settle(self, num_used: int) -> None:
        self.num_left += self.num_charged - min(num_used, self.num_charged)
        self.num_charged = 0

    def leave(self) -> None:
        self.settle(0)


@pytest.mark.req("S44", "S128")
@pytest.mark.parametrize(("path", "fields"), DOORS)
async def test_images_are_not_read_for_a_tenant_without_tokens(
    tmp_path: Path, path: str, fields: dict[str, Any]
) -> None:
    """The data is no image. The gateway would answer 400 if it read the data."""
    purse = Purse(1)
    async with (
        image_mesh(tmp_path, access=purse) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=60) as client,
    ):
        body = {"model": "tiny", **fields}
        refused = await client.post(path, json=body)
        assert refused.status_code == 429, refused.text
        purse.num_left = 100_000
        bad = await client.post(path, json=body)
        assert bad.status_code == 400, bad.text
        assert "no PNG" in bad.text
        assert (purse.num_left, purse.num_charged) == (100_000, 0)


@pytest.mark.req("S44", "S128")
async def test_a_prompt_with_an_image_is_charged_once(tmp_path: Path) -> None:
    purse = Purse(100_000)
    part = {"type": "image_url", "image_url": {"url": data_uri(png(1))}}
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": [part]}], "max_tokens": 4,
        "ignore_eos": True,
    }  # fmt: skip
    async with (
        image_mesh(tmp_path, access=purse) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=60) as client,
    ):
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert purse.num_left == 100_000 - answer.json()["usage"]["total_tokens"]
