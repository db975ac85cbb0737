"""Runs a whole mesh behind a real Envoy. Two gateway processes have an endpoint picker each, and
Envoy asks the pickers which gateway takes a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest_asyncio

from pdmesh.embedded.ports import PortReservation
from pdmesh.launcher.mesh import Mesh
from tests.support.proxies.envoy import Envoy, picker_config
from tests.support.sites import fleet
from tests.support.waiting import until

GATEWAYS = ("gateway-0", "gateway-1")
# The number of tokens that the prompts of a kind share. Fewer tokens may be cheaper to recompute
# than to queue for.
BLOCKS = 1024


@asynccontextmanager
async def picked_mesh(folder: Path) -> AsyncIterator[tuple[Mesh, Envoy]]:
    """A mesh with two prefills, two decodes, and two gateways that share no port."""
    reserved = [PortReservation("127.0.0.1", 0) for _ in range(6)]
    ports = [each.port for each in reserved]
    envs = {
        name: {
            "PDMESH_GATEWAY_HTTP_PORT": str(ports[number]),
            "PDMESH_GATEWAY_GRPC_PORT": str(ports[2 + number]),
            "PDMESH_GATEWAY_PICKER_PORT": str(ports[4 + number]),
            "PDMESH_GATEWAY_REUSE_PORT": "false",
        }
        for number, name in enumerate(GATEWAYS)
    }
    # A price of 0 means that placement ignores how work is spread over prefills. Prompts take long
    # to compute, so the reuse of their KV gains more than a wait on a busy machine costs.
    envs["master-scheduler"] = {"PDMESH_MASTER_SCHEDULER_BALANCE_PRICE": "0"}
    shape = fleet.two_by_two(envs, PDMESH_SIM_LAW="smollm2-cpu")
    spec = replace(shape, num_gateways=2)
    port = PortReservation("127.0.0.1", 0)
    addresses = [each.address for each in reserved]
    config = picker_config(port.port, addresses[:2], addresses[4:])
    try:
        async with Mesh(spec, folder / "mesh") as mesh, Envoy(folder, config, port) as envoy:

            async def knows_pickers() -> bool:
                return await envoy.counter("cluster.picker.membership_healthy") == len(GATEWAYS)

            await until(knows_pickers)
            yield mesh, envoy
    finally:
        for each in reserved:
            each.close()


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[tuple[Mesh, httpx.AsyncClient, Envoy]]:
    async with (
        picked_mesh(tmp_path) as (mesh, envoy),
        httpx.AsyncClient(base_url=envoy.url, timeout=120, trust_env=False) as client,
    ):
        yield mesh, client, envoy


def total(mesh: Mesh, process: str, name: str, **labels: str) -> float:
    """The sum of the metric's samples that have these labels."""
    return sum(
        value
        for found, given, value in fleet.samples(mesh, process)
        if found.startswith(name) and labels.items() <= given.items()
    )


async def ask(client: httpx.AsyncClient, prompt: list[int]) -> dict[str, Any]:
    body = {"model": "default", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, f"{answer.status_code} {answer.text} {answer.headers}"
    found: dict[str, Any] = answer.json()
    return found


def prompts(kind: int, count: int) -> list[list[int]]:
    draw = random.Random(kind)
    shared = [draw.randrange(40, 200) for _ in range(BLOCKS)]
    return [[*shared, *(draw.randrange(40, 200) for _ in range(20))] for _ in range(count)]


async def test_an_existing_gateway_uses_the_mesh_s_placement(
    site: tuple[Mesh, httpx.AsyncClient, Envoy],
) -> None:
    mesh, client, _ = site
    # All later prompts of a kind find the KV of the first one, and one gateway gets them all.
    for kind in range(4):
        first, *others = prompts(kind, 4)
        before = [total(mesh, g, "pdmesh_requests_accepted") for g in GATEWAYS]
        assert (await ask(client, first))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

        async def is_indexed(prompt: list[int] = first) -> bool:
            found = await ask(client, prompt)
            return bool(found["usage"]["prompt_tokens_details"]["cached_tokens"] >= BLOCKS)

        await until(is_indexed)
        for prompt in others:
            usage = (await ask(client, prompt))["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= BLOCKS
        after = [total(mesh, g, "pdmesh_requests_accepted") for g in GATEWAYS]
        grown = [a - b for a, b in zip(after, before, strict=True)]
        assert 0 in grown
        assert max(grown) >= 5
    # A picker planned each request once, and the request's gateway used that plan.
    num_requests = sum(total(mesh, g, "pdmesh_requests_accepted") for g in GATEWAYS)
    for source, expected in (("picker", num_requests), ("fallback", 0)):
        plans = [total(mesh, g, "pdmesh_gateway_plans", source=source) for g in GATEWAYS]
        assert sum(plans) == expected, source
    assert total(mesh, "master-scheduler", "pdmesh_plans") == num_requests
    picked = [total(mesh, g, "pdmesh_picker_picks", pdmesh_outcome="planned") for g in GATEWAYS]
    assert sum(picked) == num_requests


async def is_gone(pid: int) -> bool:
    """Whether all threads of the process have ended, so that its sockets are closed. The first
    thread may end before the others.
    """
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if task.read_text().rpartition(")")[2].split()[0] != "Z":
                return False
    return True


async def test_killed_processes_cost_no_request_that_comes_afterwards(
    site: tuple[Mesh, httpx.AsyncClient, Envoy],
) -> None:
    """A killed gateway process takes an endpoint and a picker with it.

    Envoy may answer 500 until its health check has found a dead picker (see docs).
    """

    mesh, client, envoy = site

    async def failed_checks() -> int:
        return await envoy.counter("cluster.picker.health_check.failure")

    async def is_known(victim: str, pid: int, failed_before: int) -> bool:
        """Whether Envoy has noticed the dead picker, or the killed process is already back."""
        if await failed_checks() > failed_before:
            return True
        return mesh.supervisor.pid(victim) not in (None, pid) and not await mesh.health.missing(
            victim
        )

    for victim in ("gateway-0", "master-scheduler", "prefill-0"):
        pid, failed_before = mesh.pid(victim), await failed_checks()
        mesh.kill(victim)
        await until(partial(is_gone, pid))
        if victim in GATEWAYS:
            await until(partial(is_known, victim, pid, failed_before))
        answers = await asyncio.gather(*(ask(client, p) for p in prompts(7, 12)))
        assert len({a["choices"][0]["text"] for a in answers}) > 1
        await mesh.wait_ready(timeout_s=120)
