"""Runs one or two master-schedulers over a real NATS server. Tests their plans for requests, the
change of leadership, and what they know of the instances.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import grpc
import pytest

from pdmesh.core.kv.prefix.prefix_index import IndexDelta
from pdmesh.errors import InvalidRequest, MeshError, NotLeader
from pdmesh.events.v1.events_pb2 import (
    FaultReport,
    GroupChanged,
    HealthChanged,
    InstanceHealth,
    InstanceLoad,
    LeaderChanged,
    RequestFinished,
)
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import EventPublisher, decode_event
from pdmesh.net.grpc import rpc
from pdmesh.net.mesh_link import MeshLink
from pdmesh.net.nats.assignments import NatsAssignments
from pdmesh.net.nats.board import fault_board, health_board
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import NatsLease, NatsRegistry
from pdmesh.net.tasks import end
from pdmesh.service_process import App
from pdmesh.services.health_monitor.monitor import HealthMonitor
from pdmesh.services.master_scheduler.admin.callers import AdminAccess
from pdmesh.services.master_scheduler.master import Master
from pdmesh.services.master_scheduler.settings import Settings
from pdmesh.v1.common_pb2 import (
    INSTANCE_PHASE_READY,
    ROLE_DECODE,
    ROLE_PREFILL,
    InstanceRecord,
    Usage,
)
from pdmesh.v1.groups_pb2 import Assignment
from pdmesh.v1.scheduler_service_pb2 import (
    HEALTH_HEALTHY,
    InstanceState,
    ListGroupsRequest,
    MatchPrefixRequest,
    PlanQuery,
    PlanRequest,
    PlanResponse,
)
from pdmesh.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from tests.support.sites import servers
from tests.support.waiting import until

LEASE_S = 3.0  # a machine that stands still for a second must not lose its lease


class Running:
    """A master with its own NATS connection, as each master process has."""

    async def start(self, server: servers.TestServer, name: str, incarnation: int) -> None:
        self.name = name
        app = App("master-scheduler", name, incarnation, asyncio.Event())
        self.bus = await NatsBus.connect(server.url, name)
        registry = NatsRegistry(self.bus, LEASE_S)
        self.view = await registry.watch()
        settings = Settings(instance_id=name, lease_s=LEASE_S)
        self.master = Master(settings, app, self.bus, registry, self.view, AdminAccess(""))
        await self.master.start()
        self.channel = rpc.channel(f"127.0.0.1:{self.master.port}")
        self.stub = SchedulerServiceStub(self.channel)

    async def plan(self, *queries: PlanQuery) -> PlanResponse:
        try:
            return await self.stub.Plan(PlanRequest(gateway_id="g", queries=queries), timeout=60)
        except grpc.aio.AioRpcError as exc:
            raise rpc.from_rpc_error(exc) from exc

    async def stop(self) -> None:
        await self.channel.close(None)
        await self.master.stop()
        await self.view.close()
        await self.bus.close()


@pytest.fixture
async def leases(bus: NatsBus) -> AsyncIterator[dict[str, NatsLease]]:
    """The leases of two prefills and two decodes of one group."""
    registry, leases = NatsRegistry(bus, LEASE_S), {}
    for role, name in ((ROLE_PREFILL, "prefill"), (ROLE_DECODE, "decode")):
        for i in range(2):
            record = InstanceRecord(
                instance_id=f"{name}-{i}", incarnation=5, service=name, role=role, group_id="g0",
                scenario="default", model="m", model_fingerprint="f", block_size=64,
                num_kv_blocks=1000, num_slots=8, max_model_len=4096, phase=INSTANCE_PHASE_READY,
            )  # fmt: skip
            leases[record.instance_id] = await registry.register(record)
    yield leases
    for lease in leases.values():
        await lease.release()


@pytest.fixture
async def leader(server: servers.TestServer, leases: object) -> AsyncIterator[Running]:
    running = Running()
    await running.start(server, "master-a", 1)
    await until(lambda: running.master.election.is_leader)
    await until(lambda: len(running.master.fleet.instances) == 4)
    yield running
    await running.stop()


def query(**fields: object) -> PlanQuery:
    values: dict[str, object] = {"request_id": "r", "num_prompt_tokens": 128, "max_tokens": 8}
    return PlanQuery(**(values | fields))  # type: ignore[arg-type]


@pytest.mark.req("S71")
async def test_the_leader_ranks_instances_of_one_group(leader: Running) -> None:
    response = await leader.plan(query(model="m"), query(request_id="x", model="other"))
    planned, refused = response.results
    assert sorted(c.instance_id for c in planned.prefills) == ["prefill-0", "prefill-1"]
    assert sorted(c.instance_id for c in planned.decodes) == ["decode-0", "decode-1"]
    assert {c.incarnation for c in planned.prefills} == {5}
    assert (planned.group_id, response.epoch) == ("g0", leader.master.election.epoch)
    assert (refused.request_id, refused.error_reason) == ("x", "MODEL_NOT_FOUND")


async def test_a_malformed_query_is_the_callers_fault(leader: Running) -> None:
    with pytest.raises(InvalidRequest):
        await leader.plan(query(block_hashes=[b"short"]))


async def test_the_leader_says_what_the_instances_of_each_scenario_hold(leader: Running) -> None:
    hashes = [bytes([i]) * 16 for i in range(4)]
    leader.master.index.apply(IndexDelta("prefill-1", 5, 1, (), hashes[:3]))
    asked = MatchPrefixRequest(gateway_id="g", block_hashes=hashes)
    answer = await leader.stub.MatchPrefix(asked, timeout=60)
    assert (dict(answer.num_blocks), answer.epoch) == (
        {"default": 3}, leader.master.election.epoch,
    )  # fmt: skip
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await leader.stub.MatchPrefix(MatchPrefixRequest(block_hashes=[b"short"]), timeout=60)
    error = rpc.from_rpc_error(caught.value)
    assert isinstance(error, InvalidRequest)
    assert error.field == "block_hashes"


@pytest.mark.req("S92")
async def test_loads_and_verdicts_reach_the_plan(leader: Running, bus: NatsBus) -> None:
    publisher = EventPublisher(bus, "prefill-0", 5)
    await publisher.publish(
        subjects.instance_load("prefill-0"),
        InstanceLoad(num_slots=8, num_slots_used=8, num_kv_blocks_free=9),
    )
    fleet = leader.master.fleet
    await until(lambda: fleet.instances["prefill-0"].num_slots_used == 8)
    first = (await leader.plan(query())).results[0].prefills[0]
    assert first.instance_id == "prefill-1"
    await health_board(bus).write(
        "prefill-1",
        HealthChanged(instance_id="prefill-1", instance_incarnation=5, to_health="suspect"),
    )
    await until(lambda: not fleet.instances["prefill-1"].is_usable)
    prefills = (await leader.plan(query())).results[0].prefills
    assert [c.instance_id for c in prefills] == ["prefill-0"]


@pytest.mark.req("S92")
async def test_an_instances_report_is_shown_with_its_age(leader: Running, bus: NatsBus) -> None:
    publisher = EventPublisher(bus, "decode-0", 5)

    async def shown() -> InstanceState:
        groups = (await leader.stub.ListGroups(ListGroupsRequest())).groups
        states = (i for group in groups for i in group.instances)
        return next(i for i in states if i.record.instance_id == "decode-0")

    async def report(num_used: int, num_free: int) -> None:
        load = InstanceLoad(num_slots=8, num_slots_used=num_used, num_kv_blocks_free=num_free)
        await publisher.publish(subjects.instance_load("decode-0"), load)

        async def is_shown() -> bool:
            state = await shown()
            return (state.num_slots_used, state.num_kv_blocks_free) == (num_used, num_free)

        await until(is_shown)

    async def is_old() -> bool:
        return (await shown()).load_age_ms > 1500

    await report(5, 77)
    await until(is_old)
    old_ms = (await shown()).load_age_ms
    await report(6, 70)
    assert (await shown()).load_age_ms < old_ms


@pytest.mark.req("S34")
async def test_an_instance_with_a_fault_is_not_chosen_and_the_report_says_why(
    leader: Running, bus: NatsBus
) -> None:
    fleet, board = leader.master.fleet, fault_board(bus)
    report = FaultReport(instance_id="prefill-1", instance_incarnation=5, level=2)
    report.signals.add(source="engine", reason="ENGINE_SILENT", level=2, is_proof=True)
    await board.write("prefill-1", report)
    await until(lambda: not fleet.instances["prefill-1"].is_usable)
    prefills = (await leader.plan(query())).results[0].prefills
    assert [c.instance_id for c in prefills] == ["prefill-0"]
    groups = (await leader.stub.ListGroups(ListGroupsRequest())).groups
    shown = {i.record.instance_id: i for group in groups for i in group.instances}
    assert shown["prefill-1"].fault_level == 2
    assert shown["prefill-1"].fault_reasons == "ENGINE_SILENT"
    report.held_back = "panic"
    await board.write("prefill-1", report)
    await until(lambda: fleet.instances["prefill-1"].is_usable)
    report.held_back = ""
    await board.write("prefill-1", report)
    await until(lambda: not fleet.instances["prefill-1"].is_usable)
    await board.forget("prefill-1")
    await until(lambda: fleet.instances["prefill-1"].is_usable)


@pytest.mark.req("S93", "S107")
async def test_a_report_settles_bookings_by_id_and_teaches_the_predictor(
    leader: Running, bus: NatsBus
) -> None:
    fleet = leader.master.fleet
    plan = (await leader.plan(query(request_id="r7"))).results[0]
    first, second = (c.instance_id for c in plan.prefills)
    assert fleet.instances[first].used_slots() == 1
    await EventPublisher(bus, second, 5).publish(
        subjects.instance_load(second),
        InstanceLoad(
            num_slots=8,
            num_slots_used=1,
            num_kv_blocks_free=990,
            admitted_request_ids=["r7"],
            computed=[
                InstanceLoad.Computed(request_id="r6", num_tokens=128, seconds=0.25),
            ],
        ),
    )
    await until(lambda: fleet.instances[second].num_slots_used == 1)
    assert (
        fleet.instances[first].used_slots() == 0
        # The first candidate rejected the request, but its own reports do not say so.
    )
    ((_, fit),) = fleet.predictor.fits()
    assert fit.num_observed == 1
    assert fit.predict_s(128, 0) == pytest.approx(0.25, rel=0.1)


@pytest.mark.req("S2", "S138")
async def test_gateways_reports_of_requests_become_the_scenarios_numbers(
    leader: Running, bus: NatsBus
) -> None:
    publisher = EventPublisher(bus, "gateway-0", 1)
    usage = Usage(num_prompt_tokens=100, num_cached_tokens=50, num_completion_tokens=11)
    for outcome in ("failed", "completed"):
        event = RequestFinished(
            scenario="default", outcome=outcome, usage=usage, queue_ms=100, ttft_ms=300,
            e2e_ms=1400,
            kv_transfer_ms=100,
        )  # fmt: skip
        await publisher.publish(subjects.request_finished("gateway-0"), event)
    scenarios = leader.master.scenarios
    await until(lambda: bool(scenarios.items()))
    ((name, stats),) = scenarios.items()
    assert (name, stats.num) == ("default", 1)
    assert (stats.t_p, stats.tpot, stats.hit_share) == pytest.approx((0.2, 0.1, 0.5))
    phi = scenarios.phi("default", leader.master.fleet.instances.values(), time.monotonic())
    assert (phi.prefill, phi.decode) == pytest.approx((16 / 0.2, 16 / 1.1))


@pytest.mark.fault("F11")
async def test_a_standby_refuses_then_takes_over_under_a_higher_epoch(
    server: servers.TestServer, leader: Running, bus: NatsBus
) -> None:
    heard: list[tuple[str, int]] = []

    async def hear(message: Message) -> None:
        event = decode_event(message, LeaderChanged)
        heard.append((event.leader_id, event.epoch))

    await bus.subscribe(subjects.leader_changed(), hear)
    standby = Running()
    await standby.start(server, "master-b", 2)
    with pytest.raises(NotLeader):
        await standby.plan(query())
    first_epoch = (await leader.plan(query())).epoch
    # Like a partitioned process, the leader can neither renew its lease nor give it up.
    await leader.bus.close()

    async def has_taken_over() -> bool:
        with contextlib.suppress(MeshError):
            return (await standby.plan(query())).epoch > first_epoch
        return False

    await until(has_taken_over)
    with pytest.raises(NotLeader):  # the former leader knows that its leadership is over
        await leader.plan(query())
    await until(lambda: heard)
    assert heard[-1][0] == "master-b"
    await until(lambda: standby.view.records["master-b"].is_leader)
    await standby.stop()


@pytest.mark.fault("F21")
async def test_a_leader_continues_above_the_epochs_that_instances_remember(
    leader: Running, leases: dict[str, NatsLease]
) -> None:
    """Epochs number the leaderships of masters, and an instance remembers the epoch of its last
    order. The store was wiped and the masters restarted, but the instances kept running.
    """
    record = InstanceRecord()
    record.CopyFrom(leader.view.records["prefill-0"])
    record.epoch = 5000
    await leases["prefill-0"].update(record)
    await until(lambda: leader.view.records["master-a"].epoch == 5001)
    assert leader.view.records["master-a"].is_leader
    assert (await leader.plan(query())).epoch == 5001


@pytest.mark.fault("F21")
async def test_a_leader_begins_above_the_epochs_of_what_is_stored(
    server: servers.TestServer, bus: NatsBus
) -> None:
    """A new epoch is a revision of the store. A wipe has set the revisions back below the stored
    epochs, and then the whole mesh was restarted.
    """
    book = await NatsAssignments(bus).book()
    await book.write(Assignment(instance_id="i-0", incarnation=1, epoch=7000))
    running = Running()
    await running.start(server, "master-a", 1)
    try:
        await until(lambda: running.master.election.epoch > 7000)
        await until(lambda: running.master.election.is_leader)
        await book.forget("i-0", running.master.election.epoch)
    finally:
        await running.stop()
        await book.close()


@pytest.mark.req("S12", "S13")
async def test_groups_are_announced_and_listed(
    leader: Running, bus: NatsBus, leases: dict[str, NatsLease]
) -> None:
    heard: list[GroupChanged] = []

    async def hear(message: Message) -> None:
        heard.append(decode_event(message, GroupChanged))

    await bus.subscribe(subjects.group_changed(), hear)
    await EventPublisher(bus, "test", 1).publish(subjects.group_changed("sync"), GroupChanged())
    await until(lambda: heard)  # by now the server knows the subscription
    await leases["decode-1"].release()
    await until(lambda: list(heard[-1].decode_ids) == ["decode-0"])
    groups = (await leader.stub.ListGroups(ListGroupsRequest(), timeout=60)).groups
    states = {s.record.instance_id: s.health for g in groups for s in g.instances}
    assert states == dict.fromkeys(("prefill-0", "prefill-1", "decode-0"), HEALTH_HEALTHY)


@pytest.mark.fault("F18")
async def test_a_silent_instance_is_suspected_by_the_monitor_and_left_out_by_the_master(
    leader: Running, bus: NatsBus
) -> None:
    """The instances renew their leases but send no heartbeats, as if their event loops hung."""
    view = await NatsRegistry(bus, LEASE_S).watch()
    monitor = HealthMonitor(
        MeshLink(bus, view, EventPublisher(bus, "hm", 1)),
        health_board(bus),
        lease_s=LEASE_S,
        forget_s=60.0,
    )
    watching = asyncio.create_task(monitor.run())
    fleet = leader.master.fleet
    await until(lambda: not any(i.is_usable for i in fleet.instances.values()))
    response = await leader.plan(query())
    assert response.results[0].error_reason == "NO_INSTANCE"
    beat = EventPublisher(bus, "prefill-0", 5)
    await beat.publish(subjects.health_instance("prefill-0"), InstanceHealth(service="prefill"))
    await until(lambda: fleet.instances["prefill-0"].is_usable)
    await end([watching])
    await view.close()
