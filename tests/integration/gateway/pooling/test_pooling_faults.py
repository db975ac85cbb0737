"""Lets pooling instances, which turn texts into vectors, die, freeze, reject calls and vanish.
Every call must get its answer, and no instance may keep a call after its end.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import httpx

from pdmesh.core.instance.step_time_law import Law
from pdmesh.core.kv.prefix.block_hash import token_array
from pdmesh.engine.sim.pooling import normalised, vector
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.fakes.pooling_instances import SEED, PoolingSite, pooling_instance
from tests.support.waiting import until

SLOW = Law("slow", prefill_fixed_s=0.02)
NEVER = Law("never", prefill_fixed_s=3600.0)


def expected(tokens: list[int]) -> Any:
    return normalised(vector(token_array(tokens), 16, SEED)).astype("<f4").tolist()


def inputs_of(call: int) -> list[list[int]]:
    return [[1 + (call * 31 + i) % 90, 1 + i] for i in range(40)]


async def test_no_answer_is_lost_when_one_of_two_instances_dies_under_load(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        sites = [
            await stack.enter_async_context(pooling_instance(f"pooling-{i}", law=SLOW, num_slots=8))
            for i in range(2)
        ]
        mesh = await stack.enter_async_context(gateway_mesh(tmp_path, 0, 0))
        for site in sites:
            mesh.register(site.record)
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=mesh.url, timeout=120))

        async def one(call: int) -> tuple[int, Any]:
            body = {"model": "vectors", "input": inputs_of(call)}
            answer = await http.post("/v1/embeddings", json=body)
            return answer.status_code, [e["embedding"] for e in answer.json().get("data", ())]

        calls = [asyncio.create_task(one(call)) for call in range(8)]
        await until(lambda: sites[0].engine.stats().num_tokens > 0)
        await sites[0].die()
        for call, (status, found) in enumerate(await asyncio.gather(*calls)):
            assert (status, found) == (200, [expected(tokens) for tokens in inputs_of(call)])
        assert sum(event.num_migrations for event in mesh.events) > 0
        await sites[1].until_idle()


async def test_a_client_that_leaves_frees_the_instance(tmp_path: Path) -> None:
    async with (
        pooling_instance("pooling-0", law=NEVER) as site,
        gateway_mesh(tmp_path, 0, 0) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=60) as http,
    ):
        mesh.register(site.record)
        body = {"model": "vectors", "input": inputs_of(0)}
        call = asyncio.create_task(http.post("/v1/embeddings", json=body))
        await until(lambda: site.host.admission.num_slots_used > 0)
        call.cancel()
        await until(lambda: site.host.admission.num_slots_used == 0)
        await until(lambda: [event.outcome for event in mesh.events] == ["cancelled"])
        assert mesh.gateway.frontend.num_calls == 0


async def test_a_gateway_that_drains_ends_the_call_with_an_error(tmp_path: Path) -> None:
    async with (
        pooling_instance("pooling-0", law=NEVER) as site,
        gateway_mesh(tmp_path, 0, 0) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=60) as http,
    ):
        mesh.register(site.record)
        body = {"model": "vectors", "input": [1, 2]}
        call = asyncio.create_task(http.post("/v1/embeddings", json=body))
        await until(lambda: site.host.admission.num_slots_used > 0)
        await mesh.gateway.frontend.drain(0.0)
        answer = await call
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "draining"
        await until(lambda: site.host.admission.num_slots_used == 0)


async def test_a_drained_instance_gets_no_new_calls(
    mesh: GatewayMesh, http: httpx.AsyncClient, sites: list[PoolingSite]
) -> None:
    """The gateway may not have the instance's new record yet. Then the instance rejects the call,
    and the other one takes it.
    """
    sites[0].host.drain(True)
    for _ in range(6):
        answer = await http.post("/v1/embeddings", json={"model": "vectors", "input": [1]})
        assert answer.status_code == 200
    assert sites[0].host.vitals.num_accepted == 0
    assert sites[1].host.vitals.num_accepted == 6


async def test_without_a_free_slot_in_time_the_call_gets_a_429(tmp_path: Path) -> None:
    async with (
        pooling_instance("pooling-0", law=NEVER, num_slots=1) as site,
        gateway_mesh(tmp_path, 0, 0, ttft_s=0.3) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=60) as http,
    ):
        mesh.register(site.record)
        body = {"model": "vectors", "input": [1]}
        first = asyncio.create_task(http.post("/v1/embeddings", json=body))
        await until(lambda: site.host.admission.num_slots_used == 1)
        answer = await http.post("/v1/embeddings", json=body)
        assert answer.status_code == 429
        assert "retry-after" in answer.headers
        first.cancel()


async def test_when_all_instances_are_gone_the_call_gets_a_503(tmp_path: Path) -> None:
    async with (
        pooling_instance("pooling-0") as site,
        gateway_mesh(tmp_path, 0, 0, ttft_s=0.3) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=60) as http,
    ):
        mesh.register(site.record)
        mesh.store.remove("pooling-0", is_lease_end=True)
        answer = await http.post("/v1/embeddings", json={"model": "vectors", "input": [1]})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_instance"


async def test_inputs_that_killed_instances_are_refused_next_time(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        sites = [
            await stack.enter_async_context(pooling_instance(f"pooling-{i}", law=NEVER))
            for i in range(3)
        ]
        mesh = await stack.enter_async_context(gateway_mesh(tmp_path, 0, 0))
        for site in sites:
            mesh.register(site.record)
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=mesh.url, timeout=60))
        body = {"model": "vectors", "input": [1, 2, 3]}
        call = asyncio.create_task(http.post("/v1/embeddings", json=body))
        for _ in range(2):
            await until(lambda: any(s.host.admission.num_slots_used for s in sites))
            victim = next(s for s in sites if s.host.admission.num_slots_used)
            sites.remove(victim)
            await victim.die()
        assert (await call).status_code == 500
        answer = await http.post("/v1/embeddings", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "poison_request")
        assert sites[0].host.vitals.num_accepted == 0
