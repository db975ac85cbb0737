"""Tests the registry of processes and the leadership of masters over a real NATS server that is
paused, wiped or not yet started.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop

from pdmesh.net.nats.buckets import LEADER
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.kv_bucket import KvBucket
from pdmesh.net.nats.leader import LeaderElection
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.net.registry import RecordChanged
from pdmesh.v1.common_pb2 import InstanceRecord
from tests.support.sites import servers
from tests.support.waiting import PATIENCE_S, until

LEASE_S = 3.0  # a machine that stands still for a second must not lose its lease


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[servers.TestServer]:
    server = servers.nats(tmp_path)
    yield server
    server.close()


def record(name: str) -> InstanceRecord:
    return InstanceRecord(instance_id=name, incarnation=1, service="prefill")


@pytest.mark.fault("F18")
async def test_a_paused_server_is_noticed_and_makes_no_process_dead(
    server: servers.TestServer,
) -> None:
    """When a paused server continues, it ends every lease at once, before any owner can renew."""
    await server.start()
    bus = await NatsBus.connect(server.url, "test")
    registry = NatsRegistry(bus, LEASE_S)
    leases = [await registry.register(record(f"p{i}")) for i in range(5)]
    view = await registry.watch()
    seen: list[RecordChanged] = []
    view.on_change(seen.append)
    server.pause()
    await until(lambda: not view.is_connected)
    await until(lambda: not any(lease.is_held for lease in leases))
    server.resume()
    await until(lambda: view.is_connected)
    await until(lambda: all(lease.is_held for lease in leases))
    # Long enough to judge a process dead, if processes could be judged now.
    await asyncio.sleep(2 * LEASE_S)
    assert seen == []
    assert len(view.records) == 5
    for lease in leases:
        await lease.release()
    await view.close()
    await bus.close()


@pytest.mark.fault("F21")
async def test_a_wiped_store_is_filled_again_by_the_owners(server: servers.TestServer) -> None:
    await server.start()
    bus, other = [await NatsBus.connect(server.url, "test") for _ in range(2)]
    lease = await NatsRegistry(bus, LEASE_S).register(record("p0"))
    view = await NatsRegistry(other, LEASE_S).watch()
    server.kill()
    server.wipe()
    await server.start()
    await until(lambda: view.is_connected)
    fresh = await NatsRegistry(other, LEASE_S).watch()
    await until(lambda: "p0" in fresh.records)
    assert "p0" in view.records
    await until(lambda: lease.is_held)
    await lease.release()
    for each in (view, fresh):
        await until(lambda each=each: not each.records)
        await each.close()
    await bus.close()
    await other.close()


async def test_a_process_that_starts_before_its_server_waits_for_it(
    server: servers.TestServer,
) -> None:
    connecting = asyncio.create_task(NatsBus.connect(server.url, "test"))
    await asyncio.sleep(0.5)
    assert not connecting.done()
    await server.start()
    bus = await asyncio.wait_for(connecting, PATIENCE_S)
    assert bus.is_connected
    await bus.close()


class Candidate:
    def __init__(self, bus: NatsBus, name: str, lease_s: float = LEASE_S) -> None:
        self.changes: list[tuple[bool, int]] = []
        self.bus = bus
        self.election = LeaderElection(
            bus, "master", name, 1, lease_s, lambda *change: self.changes.append(change)
        )
        self.election.start()

    async def stop(self) -> None:
        await self.election.stop()
        await self.bus.close()


@pytest.mark.req("S71")
@pytest.mark.fault("F11")
async def test_a_standby_takes_over_with_a_higher_epoch(server: servers.TestServer) -> None:
    await server.start()
    a = Candidate(await NatsBus.connect(server.url, "a"), "a")
    await until(lambda: a.election.is_leader)
    b = Candidate(await NatsBus.connect(server.url, "b"), "b")
    with pytest.raises(AssertionError):
        await until(lambda: b.election.is_leader, within_s=2 * LEASE_S)
    # As when its process is killed, the leader can neither renew nor give up its lease.
    await a.bus.close()
    await until(lambda: b.election.is_leader)
    assert not a.election.is_leader
    assert b.election.epoch > a.election.epoch
    await b.stop()
    await a.stop()


async def test_a_leader_that_stops_hands_over_before_its_lease_ends(
    server: servers.TestServer,
) -> None:
    """The lease is longer than the test waits. So the standby leads in time only if the leader
    hands over.
    """
    await server.start()
    a, b = [
        Candidate(await NatsBus.connect(server.url, n), n, lease_s=4 * PATIENCE_S)
        for n in ("a", "b")
    ]
    await until(lambda: a.election.is_leader or b.election.is_leader)
    leader, standby = (a, b) if a.election.is_leader else (b, a)
    await leader.stop()
    await until(lambda: standby.election.is_leader)
    await standby.stop()


@pytest.mark.fault("F12", "F13")
async def test_a_leader_without_its_store_fences_itself_before_its_lease_ends(
    server: servers.TestServer,
) -> None:
    """`core.control.leadership` and its test define when a leader gives up. This test shows that a
    leader gives up even while the store does not answer, and that its master learns of the end.
    """
    await server.start()
    a = Candidate(await NatsBus.connect(server.url, "a"), "a")
    await until(lambda: a.election.is_leader)
    server.kill()
    await until(lambda: not a.election.is_leader)
    await until(lambda: [is_leader for is_leader, _ in a.changes] == [True, False])
    await server.start()
    await until(lambda: a.election.is_leader)
    epochs = [epoch for is_leader, epoch in a.changes if is_leader]
    assert epochs == sorted(set(epochs))
    # Each win began a new epoch, the number of the leadership, and no epoch came twice.
    assert len(epochs) == a.election.num_won == 2
    await a.stop()


@pytest.mark.fault("F13", "F21")
async def test_a_wiped_store_makes_no_second_leader_while_the_first_may_lead(
    server: servers.TestServer,
) -> None:
    """The nemesis, a test with random faults, found this fault. The standby won at once, and the
    two leaders raised their epochs above each other's until the first leader noticed.
    """
    await server.start()
    a = Candidate(await NatsBus.connect(server.url, "a"), "a", lease_s=4.0)
    await until(lambda: a.election.is_leader)
    b = Candidate(await NatsBus.connect(server.url, "b"), "b", lease_s=4.0)
    lease = KvBucket(b.bus, LEADER, ttl_s=4.0)
    joined = await lease.get("master")
    assert joined is not None

    async def is_renewed() -> bool:  # waits until the standby has seen the lease, too
        entry = await lease.get("master")
        return entry is not None and entry.revision > joined.revision

    await until(is_renewed)
    await a.bus.close()  # from now on the leader receives nothing
    server.kill()
    server.wipe()
    await server.start()
    await until(lambda: b.election.is_leader)
    assert not a.election.is_leader
    await a.stop()
    await b.stop()


@pytest.mark.fault("F10", "F18")
def test_a_process_that_is_stopped_while_its_server_is_away_says_goodbye_without_an_error(
    tmp_path: Path,
) -> None:
    """The nemesis, a test with random faults, found this fault on uvloop, which services use.
    Closing the connection failed while data still waited to be sent, and the process exited with
    code 1.
    """
    server = servers.nats(tmp_path)

    async def stop_without_server() -> None:
        await server.start()
        bus = await NatsBus.connect(server.url, "test")
        server.kill()
        await until(lambda: not bus.client.is_connected)
        await bus.publish("mesh.v1.test", b"unsent")
        assert bus.client.pending_data_size > 0
        await bus.close()

    try:
        uvloop.run(stop_without_server())
    finally:
        server.close()
