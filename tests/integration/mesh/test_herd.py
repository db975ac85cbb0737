"""Tests that two gateways share one set of prefills without coordination, and do not all choose the
same prefill (S42, S43, S46).

There are sixteen prefills with one slot each. The tests count how many prefills reject each
request.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdmesh.core.placement.baselines import POLICIES
from pdmesh.core.placement.fleet import Fleet, InstanceRecorded, LoadReported
from pdmesh.core.placement.plan import Placement
from pdmesh.core.placement.policies import Weights
from pdmesh.services.gateway.gateway import Gateway
from pdmesh.services.gateway.routing.fleet import MeshView
from pdmesh.services.master_scheduler.placement import convert
from pdmesh.v1 import scheduler_service_pb2 as pb
from pdmesh.v1.common_pb2 import InstanceRecord
from tests.fakes.fake_master import FakeMaster, serving
from tests.fakes.gateway_mesh import GatewayMesh, gateway_mesh
from tests.fakes.memory_registry import MemoryView

NUM_PREFILLS = 16
PREFILL_S = 0.4  # the least time of a prefill
# A prefill takes this many times as long as everything else that a request costs this machine. So
# the sixteen prefills are the bottleneck, and not the process that runs all of them.
COSTS_PER_PREFILL = 40
# The most time of a prefill. A gateway gives up an instance that shows no work for 5 s.
MOST_S = 4.0
NUM_EACH = 6  # the number of requests of each user


class PlacingMaster(FakeMaster):
    """A master with the real placement. It learns of loads as late as in a real mesh."""

    def __init__(self, mesh: GatewayMesh) -> None:
        super().__init__()
        self._mesh = mesh
        self.fleet = Fleet()
        self._placement = Placement(
            self.fleet, random.Random(1), POLICIES["default"](), Weights(), max_candidates=8
        )
        for instance in mesh.instances.values():
            identity = convert.identity_from(instance.record())
            assert identity is not None
            self.fleet.handle(InstanceRecorded(identity), time.monotonic())

    async def report(self) -> None:
        num_told = Counter[str]()
        while True:
            await asyncio.sleep(0.02)
            for name, instance in self._mesh.instances.items():
                load = instance.load()
                taken = [p.request_id for p in instance.prefills]
                taken += [s.request_id for s in instance.starts]
                report = LoadReported(
                    name, 1, load.num_slots, load.num_slots_used, 1 << 20, False,
                    taken[num_told[name] :],
                )  # fmt: skip
                num_told[name] = len(taken)
                self.fleet.handle(report, time.monotonic())

    async def Plan(self, request: pb.PlanRequest, context: Any) -> pb.PlanResponse:
        now = time.monotonic()
        plans = [self._placement.plan(convert.query_from(q), {}, now) for q in request.queries]
        results = [convert.result_to("", plan) for plan in plans]
        return pb.PlanResponse(epoch=1, results=results)


@dataclass
class Told:
    """The results of a run. `rejections` counts requests by the number of prefills that rejected
    them. `prompts` counts prompts by prefill.
    """

    rejections: Counter[int]
    prompts: Counter[str]
    took_s: float

    @property
    def requests_per_s(self) -> float:
        return self.rejections.total() / self.took_s

    @property
    def mean_rejections(self) -> float:
        return sum(n * count for n, count in self.rejections.items()) / self.rejections.total()

    def share_of_at_most(self, num: int) -> float:
        return sum(c for n, c in self.rejections.items() if n <= num) / self.rejections.total()


@asynccontextmanager
async def two_gateways(
    directory: Path, *, has_master: bool
) -> AsyncIterator[tuple[GatewayMesh, list[Gateway]]]:
    async with AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(
            gateway_mesh(directory, NUM_PREFILLS, 1, ttft_s=120.0)
        )
        wanted_s = COSTS_PER_PREFILL * await cost_of_a_request(mesh)
        prefill_s = min(max(PREFILL_S, wanted_s), MOST_S)
        print(f"a prefill takes {prefill_s:.2f} s")
        for name, instance in mesh.instances.items():
            if name.startswith("prefill"):
                instance.num_slots, instance.prefill_s = 1, prefill_s
        if has_master:
            master = PlacingMaster(mesh)
            port = await stack.enter_async_context(serving(master))
            reporting = asyncio.create_task(master.report())
            stack.callback(reporting.cancel)
            mesh.register(
                InstanceRecord(
                    instance_id="master-0", incarnation=1, service="master-scheduler",
                    grpc_address=f"127.0.0.1:{port}", is_leader=True,
                )
            )  # fmt: skip
        settings = mesh.settings.model_copy(update={"instance_id": "gateway-1"})
        second = Gateway(settings, MeshView(MemoryView(mesh.store)), mesh.tokenizers, mesh, list)
        second.frontend.shared.next_key = itertools.count(1_000_000).__next__
        await second.start()
        stack.push_async_callback(second.stop)
        yield mesh, [mesh.gateway, second]


async def cost_of_a_request(mesh: GatewayMesh) -> float:
    """The median time of a request with prefills that take no time.

    This is how much longer than its prefill a request takes on this machine now.
    """
    url, costs = f"http://127.0.0.1:{mesh.gateway.http.port}/v1/completions", []
    async with httpx.AsyncClient(timeout=60) as client:
        for number in range(9):
            began = time.monotonic()
            body = {"model": "tiny", "prompt": f"cost {number}", "max_tokens": 2}
            assert (await client.post(url, json=body)).status_code == 200
            costs.append(time.monotonic() - began)
    await mesh.gateway.observer.publish_rest()  # otherwise `drive` would count these events
    return statistics.median(costs)


async def drive(mesh: GatewayMesh, gateways: list[Gateway], num_users: int) -> Told:
    """Let each user send one request after the other. Half of the users use each gateway."""
    num_before = len(mesh.events)
    began = time.monotonic()
    async with httpx.AsyncClient(timeout=300) as client:

        async def user(number: int) -> None:
            url = f"http://127.0.0.1:{gateways[number % 2].http.port}/v1/completions"
            for _ in range(NUM_EACH):
                body = {"model": "tiny", "prompt": f"{number} {time.monotonic()}", "max_tokens": 2}
                assert (await client.post(url, json=body)).status_code == 200

        await asyncio.gather(*(user(n) for n in range(num_users)))
    took_s = time.monotonic() - began
    for gateway in gateways:
        await gateway.observer.publish_rest()
    events = mesh.events[num_before:]
    told = Told(
        Counter(event.num_rejections for event in events),
        Counter(event.prefill_id for event in events),
        took_s,
    )
    assert told.rejections.total() == num_users * NUM_EACH
    print(
        f"{num_users} users: {told.rejections.total()} requests, {told.mean_rejections:.2f} "
        "rejections each,"
        f" histogram {dict(sorted(told.rejections.items()))}, busiest prefill "
        f"{max(told.prompts.values())},"
        f" {told.requests_per_s:.1f} a second"
    )
    return told


@pytest.mark.req("S42", "S43")
@pytest.mark.parametrize("has_master", [True, False], ids=["master", "alone"])
async def test_two_gateways_at_half_load_do_not_choose_the_same_prefills(
    tmp_path: Path, has_master: bool
) -> None:
    """Eight prompts run at a time, and there are sixteen slots.

    If both gateways ranked the prefills alike, each would choose prefills that the other one uses,
    and would be rejected.
    """
    async with two_gateways(tmp_path, has_master=has_master) as (mesh, gateways):
        told = await drive(mesh, gateways, num_users=8)
    assert told.mean_rejections < 0.7
    assert told.share_of_at_most(3) > 0.95
    if has_master:
        # Each prefill gets three or four prompts on average. By chance, one or two prefills may get
        # none.
        assert len(told.prompts) >= NUM_PREFILLS - 2
        assert max(told.prompts.values()) < 2.5 * told.prompts.total() / NUM_PREFILLS


@pytest.mark.req("S43", "S46")
@pytest.mark.parametrize("has_master", [True, False], ids=["master", "alone"])
async def test_two_gateways_under_twice_the_load_keep_every_prefill_busy(
    tmp_path: Path, has_master: bool
) -> None:
    """When a slot becomes free, both gateways send a waiting request. The prefill rejects one of
    the two, which waits again.

    The test compares the rate of requests with the rate at one prompt for every two slots.
    """
    async with two_gateways(tmp_path, has_master=has_master) as (mesh, gateways):
        peace = await drive(mesh, gateways, num_users=NUM_PREFILLS // 2)
        told = await drive(mesh, gateways, num_users=2 * NUM_PREFILLS)
    assert told.requests_per_s > peace.requests_per_s, "twice as many slots"
    assert len(told.prompts) == NUM_PREFILLS
    assert min(told.prompts.values()) > 0.3 * told.prompts.total() / NUM_PREFILLS
