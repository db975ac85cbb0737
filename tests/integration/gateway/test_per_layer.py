"""Tests the gateway's part of a per-layer hand-over, in which the prefill sends KV to the decode
layer by layer. The gateway chooses a decode early, and undoes that choice after a failure (S48,
S51).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from pdmesh.services.gateway.settings import Settings
from pdmesh.v1.instance_service_pb2 import (
    KV_TRANSFER_PER_LAYER,
    KV_TRANSFER_WHOLE,
    REJECT_REASON_BUSY,
)
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.support.waiting import until

pytestmark = pytest.mark.req("S48", "S51")


@pytest_asyncio.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[GatewayMesh]:
    async with gateway_mesh(tmp_path, 2, 2, kv_transfer="per_layer") as running:
        yield running
        await until(lambda: running.num_legs == 0)
        assert running.gateway.sessions.counts()[1] == 0


async def ask(mesh: GatewayMesh, num_tokens: int = 6) -> str:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": num_tokens}
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{mesh.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def hold_prefills(mesh: GatewayMesh) -> None:
    for name in ("prefill-0", "prefill-1"):
        mesh.instances[name].is_holding = True


def finish_prefills(mesh: GatewayMesh) -> None:
    for name in ("prefill-0", "prefill-1"):
        mesh.instances[name].finish_prefills()


def num_starts(mesh: GatewayMesh) -> int:
    return sum(len(i.starts) for i in mesh.instances.values())


async def test_decode_is_started_at_accepted_and_later_gets_token_1(mesh: GatewayMesh) -> None:
    hold_prefills(mesh)
    asking = asyncio.create_task(ask(mesh))
    await until(lambda: num_starts(mesh) == 1)
    (start,) = [s for i in mesh.instances.values() for s in i.starts]
    assert start.awaits_first_token
    assert start.sampling.max_tokens == 5
    finish_prefills(mesh)
    assert await asking == mesh.expected_text("abc", 6)
    (join,) = [j for i in mesh.instances.values() for j in i.joins]
    assert join.key == start.key
    assert num_starts(mesh) == 1


async def test_an_answer_of_one_token_starts_no_decode(mesh: GatewayMesh) -> None:
    assert await ask(mesh, 1) == mesh.expected_text("abc", 1)
    assert num_starts(mesh) == 0


async def test_a_prefill_without_per_layer_mode_hands_over_whole(mesh: GatewayMesh) -> None:
    for instance in mesh.instances.values():
        instance.is_per_layer = False
    assert await ask(mesh) == mesh.expected_text("abc", 6)
    (start,) = [s for i in mesh.instances.values() for s in i.starts]
    assert not start.awaits_first_token


async def test_decodes_that_are_busy_at_accepted_are_asked_again_at_token_1(
    mesh: GatewayMesh,
) -> None:
    hold_prefills(mesh)
    decodes = [mesh.instances["decode-0"], mesh.instances["decode-1"]]
    for decode in decodes:
        decode.reject_with = REJECT_REASON_BUSY
    asking = asyncio.create_task(ask(mesh))
    await until(lambda: sum(d.num_rejected for d in decodes) == 2)
    decodes[0].reject_with = None
    finish_prefills(mesh)
    assert await asking == mesh.expected_text("abc", 6)
    assert not decodes[0].starts[-1].awaits_first_token


@pytest.mark.fault("F6")
async def test_a_decode_lost_while_prefill_computes_is_replaced_at_token_1(
    mesh: GatewayMesh,
) -> None:
    hold_prefills(mesh)
    asking = asyncio.create_task(ask(mesh))
    await until(lambda: num_starts(mesh) == 1)
    next(i for i in mesh.instances.values() if i.starts).break_sessions()
    finish_prefills(mesh)
    assert await asking == mesh.expected_text("abc", 6)


@pytest.mark.fault("F2")
async def test_a_prefill_lost_in_the_middle_frees_the_decode_and_the_request_migrates(
    mesh: GatewayMesh,
) -> None:
    hold_prefills(mesh)
    asking = asyncio.create_task(ask(mesh))
    await until(lambda: num_starts(mesh) == 1)
    decode = next(i for i in mesh.instances.values() if i.starts)
    busy = next(i for i in mesh.instances.values() if i.prefills)
    for name in ("prefill-0", "prefill-1"):
        mesh.instances[name].is_holding = False
    busy.break_sessions()
    assert await asking == mesh.expected_text("abc", 6)
    assert decode.aborted[:1] == [decode.starts[0].key]


@pytest.mark.fault("F27")
async def test_a_client_that_leaves_frees_both_legs(mesh: GatewayMesh) -> None:
    hold_prefills(mesh)
    asking = asyncio.create_task(ask(mesh))
    await until(lambda: num_starts(mesh) == 1)
    asking.cancel()
    await until(lambda: mesh.num_legs == 0)
    assert sum(len(i.aborted) for i in mesh.instances.values()) == 2


def test_a_scenario_may_differ_from_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDMESH_KV_TRANSFER_BY_SCENARIO", '{"long": "per_layer"}')
    settings = Settings()
    assert settings.kv_transfer_of("long") == KV_TRANSFER_PER_LAYER
    assert settings.kv_transfer_of("default") == KV_TRANSFER_WHOLE
    assert settings.kv_transfer_of("") == KV_TRANSFER_WHOLE
