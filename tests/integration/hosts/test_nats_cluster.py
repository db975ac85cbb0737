"""Runs a cluster of three NATS servers in which one server dies or freezes.

No written entry may be lost, and no process may be judged dead while the servers elect another
leader.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdmesh.errors import Unavailable
from pdmesh.net.nats.bucket_keeper import BucketKeeper
from pdmesh.net.nats.buckets import DESIRED, INSTANCES
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.kv_bucket import KvBucket, WrongRevision
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.net.registry import RecordChanged
from pdmesh.net.tasks import end
from pdmesh.v1.common_pb2 import InstanceRecord
from tests.integration.hosts.conftest import HOSTS, NatsCluster
from tests.support.waiting import until

pytestmark = [
    # When a server dies, nats-py leaves its socket to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <StreamWriter:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:unclosed transport:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]
LEASE_S = 3.0


async def leader_of(looker: NatsBus, bucket: str) -> str:
    found = await looker.jetstream(5.0).stream_info(f"KV_{bucket}")
    return str(found.cluster.leader)


@contextlib.asynccontextmanager
async def _master(cluster: NatsCluster) -> AsyncIterator[NatsBus]:
    """A master's connection, with a task that makes the buckets."""
    bus = await cluster.bus("master-scheduler", "m")
    keeper = asyncio.create_task(BucketKeeper(bus, LEASE_S).run())
    try:
        await until(lambda: _has_all(bus))
        yield bus
    finally:
        await end([keeper])
        await bus.close()


async def _has_all(bus: NatsBus) -> bool:
    try:
        await KvBucket(bus, DESIRED).ensure()
        await KvBucket(bus, INSTANCES, ttl_s=LEASE_S).ensure()
    except Unavailable:
        return False
    return True


@pytest.mark.fault("F18")
async def test_a_bucket_without_a_leader_is_away_and_not_wiped(nats_cluster: NatsCluster) -> None:
    """Until the election is over, a write must fail as unavailable. Afterwards the same write must
    succeed.
    """
    async with _master(nats_cluster) as bus:
        looker = await nats_cluster.bus("viewer", "ann")
        bucket = KvBucket(bus, DESIRED)
        revision = await bucket.put("current", b"7", last=0)
        nats_cluster.members[await leader_of(looker, DESIRED)].kill()
        num_refused = 0
        while True:
            try:
                revision = await bucket.put("current", b"8", last=revision)
                break
            except Unavailable:
                num_refused += 1
            except WrongRevision:  # an earlier try was accepted, but its answer was lost
                break
        assert num_refused, "there was a leader all the time"
        found = await bucket.get("current")
        assert found is not None
        assert found.value == b"8"
        await looker.close()


@pytest.mark.fault("F18", "F21")
async def test_nobody_is_taken_for_dead_while_no_majority_takes_writes(
    nats_cluster: NatsCluster,
) -> None:
    """The processes stay connected to a server that answers all the time. But no process can renew
    its lease without a majority of servers, so the next leader reports every record as expired.
    """
    async with _master(nats_cluster):
        buses = {i: await nats_cluster.bus(r, i) for r, i in (("gateway", "g"), ("prefill", "p"))}
        leases, gone = [], []

        def on_change(change: RecordChanged) -> None:
            if change.record is None:
                gone.append(change.instance_id)

        registries = {i: NatsRegistry(bus, LEASE_S) for i, bus in buses.items()}
        for name, registry in registries.items():
            record = InstanceRecord(instance_id=name, incarnation=7)
            leases.append(await registry.register(record))
        view = await registries["g"].watch()
        view.on_change(on_change)
        others = [nats_cluster.members[host] for host in ("b", "c")]
        for server in others:
            server.kill()
        await until(lambda: not any(lease.is_held for lease in leases))
        assert all(_server_of(bus) == HOSTS["a"] for bus in buses.values())
        for server in others:
            await server.start()
        await until(lambda: all(lease.is_held for lease in leases) and view.is_connected)
        assert gone == []
        assert set(view.records) == {"g", "p"}
        await buses["p"].close()  # the process does not release its lease
        await until(lambda: gone == ["p"])
        for lease in leases:
            await lease.release()
        await view.close()
        await buses["g"].close()


@pytest.mark.fault("F18")
async def test_a_client_leaves_a_server_that_is_frozen(nats_cluster: NatsCluster) -> None:
    bus = await nats_cluster.bus("gateway", "g")
    assert _server_of(bus) == HOSTS["a"]
    nats_cluster.members["a"].pause()
    try:
        await until(lambda: _server_of(bus) not in ("", HOSTS["a"]) and bus.is_connected)
    finally:
        nats_cluster.members["a"].resume()
        await bus.close()


def _server_of(bus: NatsBus) -> str:
    """The address of the server to which the bus is connected, or an empty text."""
    found = bus.client.connected_url
    return "" if found is None else str(found.hostname)


async def test_no_process_of_the_mesh_may_join_the_cluster(nats_cluster: NatsCluster) -> None:
    """NATS servers trust each other in everything. So their certificates come from another
    authority than the certificates of the mesh's processes.
    """
    gateway = nats_cluster.ours.root / "gateway/g"
    server = nats_cluster.members["a"].directory.parents[1] / "files/a/cluster-tls"
    assert await _shakes_hands(nats_cluster, server)
    assert not await _shakes_hands(nats_cluster, gateway)


async def _shakes_hands(cluster: NatsCluster, folder: Path) -> bool:
    """Whether a server accepts this certificate on its port for other servers."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    reader, writer = await asyncio.open_connection(HOSTS["a"], cluster.ports[1], ssl=context)
    try:
        return (await asyncio.wait_for(reader.readline(), 20)).startswith(b"INFO ")
    except OSError:
        return False
    finally:
        writer.close()
