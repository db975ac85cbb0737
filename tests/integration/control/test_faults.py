"""Tests how the health-monitor judges faults, with a real NATS. The tests send heartbeats with
signs of faults, and read the reports that the health-monitor writes to a bucket, the board.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from pdmesh.core.health.fault_judge import RESTARTED_IN_VAIN, JudgePolicy
from pdmesh.events.v1.events_pb2 import FaultReport, FaultSignal, InstanceHealth, NodeReported
from pdmesh.net import subjects
from pdmesh.net.events import EventPublisher
from pdmesh.net.mesh_link import MeshLink
from pdmesh.net.nats.board import BoardView, fault_board, out_of_service_board
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import NatsLease, NatsRegistry
from pdmesh.net.tasks import end
from pdmesh.services.health_monitor.faults import FaultWatch
from pdmesh.v1.admin_service_pb2 import OutOfService
from pdmesh.v1.common_pb2 import ROLE_DECODE, InstanceRecord
from tests.support.waiting import until

LEASE_S = 2.0  # a machine that stands still for a second must not lose its lease
POLICY = JudgePolicy(confirm_s=0.2, clear_s=0.6, settle_s=0.1)
HANGS = FaultSignal(source="engine", reason="ENGINE_SILENT", level=2, is_proof=True)


@dataclass
class Site:
    """A bus with a fault watch and three decodes. The decodes send heartbeats only when the test
    says so.
    """

    bus: NatsBus
    registry: NatsRegistry
    board: BoardView[FaultReport]
    task: asyncio.Task[None]
    leases: dict[str, NatsLease] = field(default_factory=dict)
    publishers: dict[str, EventPublisher] = field(default_factory=dict)

    async def add(self, instance_id: str, incarnation: int = 5) -> None:
        record = InstanceRecord(
            instance_id=instance_id,
            incarnation=incarnation,
            service="decode",
            role=ROLE_DECODE,
            group_id="default",
            node_id="node-a",
        )
        self.leases[instance_id] = await self.registry.register(record)
        self.publishers[instance_id] = EventPublisher(self.bus, instance_id, incarnation)

    async def beat(
        self, instance_id: str, *signals: FaultSignal, vitals: InstanceHealth.Vitals | None = None
    ) -> None:
        health = InstanceHealth(service="decode", vitals=vitals or InstanceHealth.Vitals())
        health.signals.extend(signals)
        subject = subjects.health_instance(instance_id)
        await self.publishers[instance_id].publish(subject, health)

    async def until_level(self, instance_id: str, level: int, *signals: FaultSignal) -> FaultReport:
        """Send heartbeats until the board shows this fault level. Level 0 means that the board has
        no report.
        """

        async def is_there() -> bool:
            await self.beat(instance_id, *signals)
            await asyncio.sleep(0.02)
            report = self.board.known.get(instance_id)
            return (report.level if report else 0) == level

        await until(is_there)
        return self.board.known.get(instance_id, FaultReport())


@pytest.fixture
async def site(bus: NatsBus) -> AsyncIterator[Site]:
    registry = NatsRegistry(bus, LEASE_S)
    view = await registry.watch()
    board = fault_board(bus)
    link = MeshLink(bus, view, EventPublisher(bus, "hm", 1))
    watch = FaultWatch(link, board, out_of_service_board(bus), lease_s=LEASE_S, policy=POLICY)
    task = asyncio.create_task(watch.run())
    site = Site(bus, registry, board.watch(lambda _: None), task)
    for instance_id in ("decode-0", "decode-1", "decode-2"):
        await site.add(instance_id)
    yield site
    await end([site.task])
    watch.judge.check_invariants()
    for lease in site.leases.values():
        await lease.release()
    await site.board.close()
    await view.close()


@pytest.mark.req("S36", "S74")
async def test_when_an_ejection_is_lifted_earlier_restarts_are_forgotten(site: Site) -> None:
    """Once, the fault stayed on the board for ten minutes after the ejection was lifted, and the
    leader ejected the instance again at once.
    """
    for n in range(1, 4):
        await site.until_level("decode-0", 2, HANGS)
        await site.leases["decode-0"].release()
        await until(lambda: "decode-0" not in site.board.known)
        await site.add("decode-0", incarnation=5 + n)
    report = await site.until_level("decode-0", 3)
    assert report.signals[0].reason == RESTARTED_IN_VAIN
    board = out_of_service_board(site.bus)
    await board.write("decode-0", OutOfService(instance_id="decode-0", is_ejected=True))
    await board.forget("decode-0")
    await site.until_level("decode-0", 0)


@pytest.mark.req("S33", "S34")
async def test_faults_that_an_instance_reports_stay_on_the_board_until_they_heal(
    site: Site,
) -> None:
    report = await site.until_level("decode-0", 2, HANGS)
    assert report.action == "restart_process"
    assert not report.held_back
    assert report.node_id == "node-a"
    assert [s.reason for s in report.signals] == ["ENGINE_SILENT"]
    assert report.HasField("since")
    await site.until_level("decode-0", 0)


@pytest.mark.req("S33", "S34")
async def test_a_node_agents_device_fault_reaches_the_instances_that_use_it(site: Site) -> None:
    agent = EventPublisher(site.bus, "agent-a", 1)
    said = NodeReported(node_id="node-a", period_s=30.0)
    instance = said.instances.add(instance_id="decode-1", instance_incarnation=5)
    instance.signals.add(source="device", reason="DEVICE_LOST", level=5, is_proof=True)
    await agent.publish(subjects.node_reported("node-a"), said)
    report = await site.until_level("decode-1", 5)
    assert report.action == "eject_node"


@pytest.mark.req("S34")
async def test_failing_legs_alone_are_a_suspicion_and_with_a_canary_a_restart(site: Site) -> None:
    failing = InstanceHealth.Vitals(num_accepted=20, num_ended=20, num_failed=20)
    canary = FaultSignal(source="canary", reason="CANARY_FAILED", level=2)

    async def is_at(level: int, *signals: FaultSignal) -> bool:
        await site.beat("decode-0", *signals, vitals=failing)
        await asyncio.sleep(0.02)
        return (site.board.known.get("decode-0") or FaultReport()).level == level

    await until(lambda: is_at(1))
    await until(lambda: is_at(2, canary))
    reasons = {s.reason for s in site.board.known["decode-0"].signals}
    assert reasons == {"LEGS_FAIL", "CANARY_FAILED"}


@pytest.mark.fault("F35")
async def test_a_new_incarnation_begins_without_the_old_ones_faults(site: Site) -> None:
    await site.until_level("decode-0", 2, HANGS)
    zombie = site.publishers["decode-0"]
    await site.add("decode-0", incarnation=6)
    await site.until_level("decode-0", 0)
    health = InstanceHealth(service="decode", vitals=InstanceHealth.Vitals(), signals=[HANGS])
    await zombie.publish(subjects.health_instance("decode-0"), health)
    # This heartbeat comes after the one of the old incarnation, so the monitor has read both.
    await site.until_level("decode-1", 2, HANGS)
    assert "decode-0" not in site.board.known


@pytest.mark.req("S34")
async def test_reports_outlive_the_monitor_and_the_next_one_clears_those_that_no_source_repeats(
    site: Site,
) -> None:
    await site.until_level("decode-0", 2, HANGS)
    await end([site.task])
    assert site.board.known["decode-0"].level == 2
    view = await site.registry.watch()
    second = FaultWatch(
        MeshLink(site.bus, view, EventPublisher(site.bus, "hm-2", 2)), fault_board(site.bus),
        out_of_service_board(site.bus), lease_s=LEASE_S, policy=POLICY,
    )  # fmt: skip
    site.task = asyncio.create_task(second.run())
    await until(lambda: "decode-0" not in site.board.known)
    await end([site.task])
    await view.close()
