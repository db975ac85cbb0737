"""Tests a gateway behind two reverse proxies in a row, such as an ELB and an SLB (S54)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from loadtests.harness.generator import passthrough
from pdmesh.v1.common_pb2 import ROLE_DECODE
from pdmesh.v1.instance_service_pb2 import REJECT_REASON_BUSY
from tests.fakes.fake_instance import FakeInstance
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.support.waiting import until

BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 12}


@asynccontextmanager
async def balanced(directory: Path) -> AsyncIterator[tuple[GatewayMesh, FakeInstance, str]]:
    """A gateway with two proxies and the URL of the outer one. The decode takes a step only when
    the test calls `step`.
    """
    async with gateway_mesh(directory, num_decodes=0, ttft_s=0.5, stall_s=600.0) as mesh:
        decode = await mesh.add(FakeInstance(ROLE_DECODE, "decode-0", step_s=1e6))
        with passthrough(mesh.gateway.http.port) as inner, passthrough(inner) as outer:
            yield mesh, decode, f"http://127.0.0.1:{outer}"


@pytest.mark.req("S54")
async def test_each_token_passes_two_balancers_before_the_next_is_computed(tmp_path: Path) -> None:
    async with (
        balanced(tmp_path) as (mesh, decode, url),
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{url}/v1/completions", json={**BODY, "stream": True}) as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-request-id"]
        text, lines = "", answer.aiter_lines()
        for number in range(12):
            if number:
                await until(lambda: decode.legs)
                decode.step()
            while len(text) < number + 1:
                line = await asyncio.wait_for(anext(lines), 60)
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        assert text == mesh.expected_text("abc", 12)
        assert len(mesh.instances["prefill-0"].prefills) == 1, "no other leg continued it"
        assert [line async for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.req("S54")
async def test_a_client_that_leaves_its_balancer_frees_its_leg(tmp_path: Path) -> None:
    async with balanced(tmp_path) as (mesh, decode, url), httpx.AsyncClient(timeout=60) as client:
        body = {**BODY, "max_tokens": 1000, "stream": True}
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            await anext(answer.aiter_lines())
            await until(lambda: decode.legs)
        while decode.legs:  # a proxy notices that its client has left only when it writes
            decode.step()
            await asyncio.sleep(0.01)
        assert decode.aborted
        assert mesh.num_legs == 0


@pytest.mark.req("S54")
async def test_a_refusal_and_its_hint_pass_two_balancers(tmp_path: Path) -> None:
    async with balanced(tmp_path) as (mesh, _, url), httpx.AsyncClient(timeout=60) as client:
        mesh.instances["prefill-0"].reject_with = REJECT_REASON_BUSY
        answer = await client.post(f"{url}/v1/completions", json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
        assert int(answer.headers["retry-after"]) >= 1
