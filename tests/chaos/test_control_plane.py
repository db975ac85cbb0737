"""Faults of the control plane while requests and streams run, which no client may notice.

The mesh has two prefills and two decodes on the simulated engine, two masters, and a link for each
process that is cut off. Requests and long streams continue through every fault, and each must get
the exact text of one simulated model. All tests share one mesh, so each test also finds what
earlier faults left behind. Each bound is the time that a fault may cost, plus SLACK_S for a loaded
machine with two cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Self

import grpc
import httpx
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from pdmesh.errors import MeshError, NotLeader
from pdmesh.launcher.mesh import Mesh
from pdmesh.net.grpc import rpc
from pdmesh.net.grpc.mesh_token import TokenChannel
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.net.registry import RegistryView
from pdmesh.v1.scheduler_service_pb2 import (
    HEALTH_HEALTHY,
    ListGroupsRequest,
    PlanQuery,
    PlanRequest,
)
from pdmesh.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from tests.support.attack.link import Link
from tests.support.sites import fleet, servers
from tests.support.streams import StreamOutcome, stream_completion
from tests.support.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(240),
    # After an outage of the server, nats-py leaves its socket to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <StreamWriter:ResourceWarning"),
]

SLACK_S = 1.5
FENCE_S, FAILOVER_S = 2.0, 4.0
STALE_S = 6.0  # the gateway's limit on the age of its view, which is 30 s by default
STREAM_TOKENS, STEADY_TOKENS = 250, 3
MASTERS = ("master-scheduler", "master-scheduler-1")


@dataclass
class World:
    """A running mesh, its servers, and the links by process."""

    mesh: Mesh
    nats: servers.TestServer
    valkey: servers.TestServer
    links: dict[str, Link]
    view: RegistryView
    reference: fleet.Reference

    def leader(self) -> str:
        """The leader according to the registry. Empty if there is none."""
        records = self.view.records
        return next((m for m in MASTERS if m in records and records[m].is_leader), "")

    def address(self, master: str) -> str:
        return self.view.records[master].grpc_address


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    directory = tmp_path_factory.mktemp("control")
    nats, valkey = servers.nats(directory), servers.valkey(directory)
    async with contextlib.AsyncExitStack() as stack:
        for server in (nats, valkey):
            stack.callback(server.close)
            await server.start()
        links = {
            name: await stack.enter_async_context(Link(url))
            for name, url in (
                *((name, nats.url) for name in (*MASTERS, "prefill-0", "decode-0")),
                ("kv-cache-index", valkey.url),
            )
        }
        spec = fleet.two_by_two(
            {
                name: {
                    "PDMESH_REDIS_URL" if name == "kv-cache-index" else "PDMESH_NATS_URL": link.url
                }
                for name, link in links.items()
            },
            PDMESH_GATEWAY_MAX_STALENESS_S=str(STALE_S),
        )
        spec = replace(spec, nats_url=nats.url, redis_url=valkey.url, num_masters=2)
        mesh = await stack.enter_async_context(Mesh(spec, directory / "mesh", report=print))
        bus = await NatsBus.connect(nats.url, "chaos-test")
        stack.push_async_callback(bus.close)
        view = await NatsRegistry(bus, 3.0).watch()
        stack.push_async_callback(view.close)
        reference = fleet.Reference.load(directory / "model")
        yield World(mesh, nats, valkey, links, view, reference)


class Traffic:
    """Four long streams and a series of short requests, which run during the block.

    At the end, all must have the reference's text. `longest_gap_s` is the longest wait of any
    client.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.outcomes: list[StreamOutcome] = []
        self._stopping = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._client = httpx.AsyncClient(timeout=60)
        self._streams = [asyncio.create_task(self._ask(i, STREAM_TOKENS)) for i in range(4)]
        self._steady = [asyncio.create_task(self._ask_often(10 * i)) for i in range(2)]
        await until(lambda: len(self.outcomes) >= 4)  # the short requests get answers
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        self._stopping.set()
        await asyncio.wait_for(asyncio.gather(*self._steady, *self._streams), 60)
        await self._client.aclose()
        if kind is not None:
            return
        for outcome in self.outcomes:
            assert outcome.is_complete, outcome
            num_tokens = STREAM_TOKENS if len(outcome.prompt) > 100 else STEADY_TOKENS
            assert outcome.text == self._world.reference.text([*outcome.prompt], num_tokens)

    @property
    def longest_gap_s(self) -> float:
        return max(o.longest_gap_s for o in self.outcomes)

    def stop(self) -> None:
        """Send no new requests. Running requests continue."""
        self._stopping.set()

    async def _ask(self, number: int, max_tokens: int) -> StreamOutcome:
        length = 130 if max_tokens == STREAM_TOKENS else 70
        prompt = [40 + (number * 7 + i) % 80 for i in range(length)]
        outcome = await stream_completion(
            self._client, self._world.mesh.http_url, prompt, max_tokens, ignore_eos=True
        )
        self.outcomes.append(outcome)
        return outcome

    async def _ask_often(self, number: int) -> None:
        while not self._stopping.is_set():
            number += 1
            await self._ask(number, STEADY_TOKENS)
            await asyncio.sleep(0.02)


async def ask(address: str) -> int:
    """The epoch in which this master plans. Raises MeshError, or NotLeader for a standby."""
    async with rpc.channel(address) as channel:
        return await ask_over(channel)


async def ask_over(channel: grpc.aio.Channel) -> int:
    query = PlanQuery(request_id="probe", num_prompt_tokens=64, max_tokens=1)
    try:
        request = PlanRequest(gateway_id="chaos", queries=[query])
        return int((await SchedulerServiceStub(channel).Plan(request, timeout=10)).epoch)
    except grpc.aio.AioRpcError as exc:
        raise rpc.from_rpc_error(exc) from exc


async def plans(address: str) -> int:
    """The epoch in which this master plans. 0 if it does not plan."""
    with contextlib.suppress(MeshError):
        return await ask(address)
    return 0


async def settled(world: World) -> str:
    """Wait until all processes are registered and a leader plans, and return the leader."""
    await world.mesh.wait_ready(timeout_s=30)
    everybody = {*MASTERS, *fleet.INSTANCES}
    await until(lambda: everybody <= set(world.view.records), within_s=15)

    async def does_plan() -> bool:
        leader = world.leader()
        return bool(leader) and await plans(world.address(leader)) > 0

    await until(does_plan, within_s=15)
    return world.leader()


def other(master: str) -> str:
    return next(m for m in MASTERS if m != master)


@pytest.mark.fault("F12")
@pytest.mark.req("S71", "S79")
async def test_a_master_cut_off_from_nats_fences_itself_before_the_standby_leads(
    world: World,
) -> None:
    leader = await settled(world)
    standby = other(leader)
    old, new = world.address(leader), world.address(standby)
    epoch = await ask(old)
    async with Traffic(world) as traffic:
        world.links[leader].cut()

        async def is_fenced() -> bool:
            return not await plans(old)

        fenced_s = await until(is_fenced, within_s=FENCE_S + SLACK_S)
        assert not await plans(new), "two masters never plan at the same time"

        async def has_taken_over() -> bool:
            return await plans(new) > epoch

        takes_s = fenced_s + await until(has_taken_over, within_s=FAILOVER_S)
        with pytest.raises(NotLeader):
            await ask(old)
    print(f"fenced {fenced_s:.2f} s, failover {takes_s:.2f} s, gap {traffic.longest_gap_s:.2f} s")
    assert takes_s < FAILOVER_S + SLACK_S
    assert traffic.longest_gap_s < 1.0 + SLACK_S
    world.links[leader].heal()
    await until(lambda: leader in world.view.records, within_s=10)
    assert await settled(world) == standby, "the master that was cut off comes back as standby"


@pytest.mark.fault("F13")
@pytest.mark.req("S79")
async def test_a_master_that_wakes_up_after_its_lease_makes_no_plan(world: World) -> None:
    leader = await settled(world)
    old, new = world.address(leader), world.address(other(leader))
    epoch = await ask(old)
    # The channel has no keepalive, because the request waits in the socket of the frozen process.
    async with (
        TokenChannel(grpc.aio.insecure_channel(old), world.mesh.token) as channel,
        Traffic(world) as traffic,
    ):
        assert await ask_over(channel) == epoch
        world.mesh.kill(leader, signal.SIGSTOP)
        asked = asyncio.create_task(ask_over(channel))

        async def has_taken_over() -> bool:
            return await plans(new) > epoch

        takes_s = await until(has_taken_over, within_s=FAILOVER_S + SLACK_S)
        world.mesh.kill(leader, signal.SIGCONT)
        with pytest.raises(NotLeader):
            await asked
        with pytest.raises(NotLeader):
            await ask(old)
    print(f"failover {takes_s:.2f} s, gap {traffic.longest_gap_s:.2f} s")
    assert traffic.longest_gap_s < 1.0 + SLACK_S


@pytest.mark.fault("F11")
@pytest.mark.req("S71", "S79")
async def test_the_standby_takes_over_from_a_killed_master_without_a_lost_request(
    world: World,
) -> None:
    leader = await settled(world)
    new = world.address(other(leader))
    epoch = await ask(world.address(leader))
    async with Traffic(world) as traffic:
        world.mesh.kill(leader)

        async def has_taken_over() -> bool:
            return await plans(new) > epoch

        takes_s = await until(has_taken_over, within_s=FAILOVER_S + SLACK_S)
        before = planned_by_master(world)
        await until(lambda: planned_by_master(world) > before, within_s=3.0)
    print(f"failover {takes_s:.2f} s, gap {traffic.longest_gap_s:.2f} s")
    assert traffic.longest_gap_s < 1.0 + SLACK_S


def planned_by_master(world: World) -> float:
    return sum(
        value
        for name, labels, value in fleet.samples(world.mesh, "gateway-0")
        if name.startswith("pdmesh_gateway_plans_total") and labels.get("source") == "master"
    )


async def health_of(world: World, instance_id: str) -> int | None:
    """An instance's health in the leader's view.

    None if the instance is in no group, and 0 if there is no leader.
    """
    leader = world.leader()
    if not leader:
        return 0
    async with rpc.channel(world.address(leader)) as channel:
        stub = SchedulerServiceStub(channel)
        groups = (await stub.ListGroups(ListGroupsRequest(), timeout=2)).groups
    states = (s for g in groups for s in g.instances)
    return next((s.health for s in states if s.record.instance_id == instance_id), None)


@pytest.mark.fault("F19")
@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
async def test_an_instance_cut_off_from_nats_gets_no_plans_but_keeps_its_streams(
    world: World, name: str
) -> None:
    await settled(world)
    async with Traffic(world) as traffic:
        world.links[name].cut()

        async def is_out() -> bool:
            return await health_of(world, name) not in (HEALTH_HEALTHY, 0)

        out_s = await until(is_out, within_s=FAILOVER_S + SLACK_S)
        pid = world.mesh.pid(name)
        world.links[name].heal()

        async def is_back() -> bool:
            return await health_of(world, name) == HEALTH_HEALTHY

        back_s = await until(is_back, within_s=10.0)
        assert world.mesh.pid(name) == pid
    print(f"out after {out_s:.2f} s, back {back_s:.2f} s, gap {traffic.longest_gap_s:.2f} s")
    assert back_s < 5.0 + SLACK_S
    assert traffic.longest_gap_s < 1.0 + SLACK_S


@pytest.mark.fault("F16")
@pytest.mark.parametrize("how", ["slow", "frozen"])
async def test_no_request_waits_for_a_slow_or_frozen_redis(world: World, how: str) -> None:
    """Redis is 200 ms slower each way, or does not answer.

    No request needs Redis, and the index continues in memory.
    """
    await settled(world)
    link = world.links["kv-cache-index"]
    async with Traffic(world) as calm:
        await asyncio.sleep(1.0)
    lag(world, "kv-cache-index")  # reading the gauge resets it
    async with Traffic(world) as traffic:
        if how == "slow":
            link.delay_s = 0.2
        else:
            link.cut()
        await asyncio.sleep(2.0)
    lag_s = lag(world, "kv-cache-index")
    link.delay_s = 0.0
    link.heal()
    calm_s, slow_s = median_ttft_s(calm), median_ttft_s(traffic)
    print(f"median TTFT {calm_s * 1e3:.0f} -> {slow_s * 1e3:.0f} ms, loop lag {lag_s * 1e3:.0f} ms")
    assert slow_s <= calm_s + 0.05 + 0.1 * SLACK_S
    assert lag_s < 0.05 + 0.3 * SLACK_S
    await until(lambda: is_store_up(world), within_s=10.0)


def median_ttft_s(traffic: Traffic) -> float:
    times = sorted(o.first_at - o.started_at for o in traffic.outcomes if o.first_at)
    return times[len(times) // 2]


def gauge(world: World, process: str, prefix: str) -> float:
    return max(v for n, _, v in fleet.samples(world.mesh, process) if n.startswith(prefix))


def lag(world: World, process: str) -> float:
    return gauge(world, process, "pdmesh_process_loop_lag")


def is_store_up(world: World) -> bool:
    return gauge(world, "kv-cache-index", "pdmesh_index_store_up") == 1.0


@pytest.mark.fault("F17")
async def test_a_redis_without_memory_fails_no_request_and_fills_no_queue(world: World) -> None:
    await settled(world)
    redis = Redis.from_url(world.valkey.url)
    await redis.config_set("maxmemory-policy", "noeviction")
    # Redis itself needs more memory than this, so every write fails.
    await redis.config_set("maxmemory", "100kb")
    try:
        async with Traffic(world) as traffic:
            await until(lambda: not is_store_up(world), within_s=10.0)
            await asyncio.sleep(1.0)
            assert gauge(world, "kv-cache-index", "pdmesh_index_store_pending") <= 4
    finally:
        await redis.config_set("maxmemory", "0")
        await redis.aclose()
    assert traffic.longest_gap_s < 1.0 + SLACK_S
    print(f"current again after {await until(lambda: is_store_up(world), within_s=10.0):.2f} s")


@pytest.mark.fault("F21")
async def test_a_wiped_jetstream_store_is_filled_again_without_a_restart(
    world: World,
) -> None:
    await settled(world)
    pids = {name: world.mesh.pid(name) for name in world.mesh.names}
    async with Traffic(world) as traffic:
        world.nats.kill()
        world.nats.wipe()
        await world.nats.start()
        began = time.monotonic()
        fresh_bus = await NatsBus.connect(world.nats.url, "chaos-test-2")
        fresh = await NatsRegistry(fresh_bus, 3.0).watch()
        expected = {*fleet.INSTANCES, *MASTERS, "gateway-0", "kv-cache-index", "health-monitor"}
        await until(lambda: expected <= set(fresh.records), within_s=5.0 + SLACK_S)
        took_s = time.monotonic() - began
        assert took_s < 5.0 + SLACK_S
        await fresh.close()
        await fresh_bus.close()
        await settled(world)
    print(f"all registered again after {took_s:.2f} s, gap {traffic.longest_gap_s:.2f} s")
    assert {name: world.mesh.pid(name) for name in world.mesh.names} == pids
    assert traffic.longest_gap_s < 1.0 + SLACK_S


@pytest.mark.fault("F12", "F18")
async def test_without_nats_gateways_serve_from_their_last_view_until_it_is_too_old(
    world: World,
) -> None:
    """The masters fence themselves, so the gateway ranks instances itself. When its view is older
    than STALE_S, it answers 503 until NATS is back.
    """
    await settled(world)
    try:
        async with Traffic(world) as traffic:
            world.nats.pause()
            await asyncio.sleep(STALE_S - 3.0)
            traffic.stop()  # the long streams continue over gRPC
        assert traffic.longest_gap_s < 1.0 + SLACK_S
        async with httpx.AsyncClient(timeout=20) as client:

            async def is_refused() -> bool:
                outcome = await stream_completion(client, world.mesh.http_url, [50] * 9, 2)
                return outcome.status == 503

            await until(is_refused, within_s=2 * STALE_S)
    finally:
        world.nats.resume()
    async with httpx.AsyncClient(timeout=20) as client:

        async def works() -> bool:
            outcome = await stream_completion(client, world.mesh.http_url, [50] * 9, 2)
            return outcome.is_complete

        back_s = await until(works, within_s=5.0 + SLACK_S)
    print(f"works again after {back_s:.2f} s")
