"""Tests backpressure (S97). Gateways report their queue lengths to the master, which tells them the
length over all gateways. So a gateway can itself refuse a request that would wait in vain.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdmesh.core.request.backpressure import Backpressure
from pdmesh.services.master_scheduler.placement import convert
from pdmesh.v1 import scheduler_service_pb2 as pb
from pdmesh.v1.common_pb2 import InstanceRecord
from pdmesh.v1.instance_service_pb2 import REJECT_REASON_BUSY
from tests.fakes.fake_master import FakeMaster, serving
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.support.waiting import until

pytestmark = pytest.mark.req("S95", "S97")


class PressingMaster(FakeMaster):
    """A master that ranks all instances. It reports on the queues with the same core as a real
    master.
    """

    def __init__(self, prefills_per_s: float, max_waiting: int) -> None:
        super().__init__()
        self.pressure = Backpressure(lambda scenario, now: prefills_per_s, max_waiting)
        self.mesh: GatewayMesh
        self.asked: list[pb.PlanQuery] = []

    async def Plan(self, request: pb.PlanRequest, context: Any) -> pb.PlanResponse:
        self.asked += request.queries
        now = time.monotonic()
        self.pressure.book.tell(request.gateway_id, convert.queues_from(request.queues), now)
        named = {
            role: [
                pb.Candidate(instance_id=i, incarnation=instance.record().incarnation)
                for i, instance in self.mesh.instances.items()
                if i.startswith(role)
            ]
            for role in ("prefill", "decode")
        }
        result = pb.PlanResult(prefills=named["prefill"], decodes=named["decode"])
        return pb.PlanResponse(
            epoch=1,
            results=[result] * len(request.queries),
            pressures=[convert.pressure_to(self.pressure.pressure("default", now))],
        )


@asynccontextmanager
async def pressed(
    directory: Path, prefills_per_s: float = 0.0, max_waiting: int = 0, **settings: Any
) -> AsyncIterator[tuple[GatewayMesh, PressingMaster, httpx.AsyncClient]]:
    master = PressingMaster(prefills_per_s, max_waiting)
    values = {"ttft_s": 20.0, "retry_s": 0.1, **settings}
    async with (
        gateway_mesh(directory, **values) as mesh,
        serving(master) as port,
        httpx.AsyncClient(base_url=mesh.url, timeout=60) as client,
    ):
        master.mesh = mesh
        mesh.register(
            InstanceRecord(
                instance_id="master-0", incarnation=1, service="master-scheduler",
                grpc_address=f"127.0.0.1:{port}", is_leader=True,
            )
        )  # fmt: skip
        mesh.instances["prefill-0"].reject_with = REJECT_REASON_BUSY
        yield mesh, master, client


async def ask(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 4, **fields}
    return await client.post("/v1/completions", json=body)


async def fill(
    mesh: GatewayMesh,
    master: PressingMaster,
    client: httpx.AsyncClient,
    count: int,
    **fields: Any,
) -> list[asyncio.Task[httpx.Response]]:
    """Start `count` requests that wait. Returns when the gateway knows of them from the master."""
    waiting = [asyncio.create_task(ask(client, **fields)) for _ in range(count)]
    book, planner = master.pressure.book, mesh.gateway.frontend.shared.planner

    def is_heard() -> bool:
        num_told = sum(book.waiting("default", time.monotonic()).values())
        return num_told == count and planner.refusal("default", 1, 0.0, can_evict=False) is not None

    await until(is_heard)
    return waiting


async def test_a_request_that_cannot_be_served_in_time_is_refused_without_the_master(
    tmp_path: Path,
) -> None:
    """Ten requests wait, and two of them begin each second.

    A long prompt has a later deadline, so the gateway lets it wait. The gateway refuses a short
    prompt and tells its client when to come back.
    """
    async with pressed(tmp_path, prefills_per_s=2.0, ttft_s=3.0, ttft_s_per_1k_tokens=100.0) as (
        mesh,
        master,
        client,
    ):
        waiting = await fill(mesh, master, client, 10, prompt="x" * 500)
        num_asked = len({q.request_id for q in master.asked})
        refused = await ask(client)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "ttft_unreachable"
        assert refused.headers["retry-after"] == "2"
        assert len({q.request_id for q in master.asked}) == num_asked
        mesh.instances["prefill-0"].free_slots(64)
        assert {r.status_code for r in await asyncio.gather(*waiting)} == {200}
        assert (await ask(client)).status_code == 200, "the queue is empty by now"


async def test_at_the_limit_of_the_master_the_queue_is_full(tmp_path: Path) -> None:
    async with pressed(tmp_path, max_waiting=5) as (mesh, master, client):
        waiting = await fill(mesh, master, client, 5)
        refused = await ask(client)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        mesh.instances["prefill-0"].free_slots(64)
        assert {r.status_code for r in await asyncio.gather(*waiting)} == {200}
