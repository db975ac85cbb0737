"""Runs the kv-cache-index over a real NATS and a real Valkey.

The index follows which KV blocks each instance has, and copies its knowledge to Valkey. The tests
let instances, NATS and Valkey fail.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from pdmesh.core.kv.prefix.prefix_index import IndexDelta, TierDelta
from pdmesh.core.kv.tier import Tier
from pdmesh.errors import Unavailable
from pdmesh.events.v1.events_pb2 import KvBlocks
from pdmesh.kv.index.redis_index import RedisIndex, StoredInstance
from pdmesh.kv.index.snapshot_sources import IndexSource
from pdmesh.net import subjects
from pdmesh.net.events import EventPublisher
from pdmesh.net.grpc import rpc
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import NatsLease, NatsRegistry
from pdmesh.services.kv_cache_index.__main__ import running
from pdmesh.services.kv_cache_index.settings import Settings
from pdmesh.v1 import instance_service_pb2
from pdmesh.v1.common_pb2 import ROLE_PREFILL, InstanceRecord
from pdmesh.v1.instance_service_pb2 import GetKvSnapshotRequest, GetKvSnapshotResponse
from tests.support.sites import servers
from tests.support.waiting import until

LEASE_S = 3.0  # a machine that stands still for a second must not lose its lease
FINGERPRINT = "f0"


def chain(n: int, start: int = 0) -> list[bytes]:
    return [i.to_bytes(16, "big") for i in range(start, start + n)]


class Worker:
    """A fake instance. It has a record, publishes changes of its blocks, and sends snapshots."""

    def __init__(self, name: str) -> None:
        self.name, self.blocks, self.sequence, self.num_snapshots = name, set[bytes](), 0, 0
        self.host = set[bytes]()

    async def start(self, bus: NatsBus) -> None:
        self.bus = bus
        self._publisher = EventPublisher(bus, self.name, 1)
        self._server = rpc.server()
        service = instance_service_pb2.DESCRIPTOR.services_by_name["InstanceService"]
        rpc.add_service(self._server, service, self)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.lease: NatsLease = await NatsRegistry(bus, LEASE_S).register(
            InstanceRecord(
                instance_id=self.name, incarnation=1, service="prefill", role=ROLE_PREFILL,
                model_fingerprint=FINGERPRINT, grpc_address=f"127.0.0.1:{port}",
            )
        )  # fmt: skip

    async def GetModelText(self, request: object, context: object) -> AsyncIterator[object]:
        raise AssertionError("the index asks for no text")
        yield

    async def InspectAdapter(self, request: object, context: object) -> object:
        raise AssertionError("the index asks for no adapter")

    async def stop(self) -> None:
        await self.lease.release()
        await self._server.stop(0)

    async def store(
        self, blocks: list[bytes], *, host: list[bytes] | None = None, is_lost: bool = False
    ) -> None:
        self.blocks |= set(blocks)
        self.host |= set(host or ())
        self.sequence += 1
        tiers = [KvBlocks.TierBlocks(tier="host", stored=host)] if host else []
        event, subject = KvBlocks(stored=blocks, tiers=tiers), subjects.kv_blocks(self.name)
        if is_lost:  # the event gets a sequence number but is never sent
            self._publisher._sequences[subject] = self.sequence
        else:
            await self._publisher.publish(subject, event)

    async def GetKvSnapshot(
        self, request: GetKvSnapshotRequest, context: Any
    ) -> AsyncIterator[GetKvSnapshotResponse]:
        self.num_snapshots += 1
        yield GetKvSnapshotResponse(
            incarnation=1, sequence=self.sequence, block_hashes=list(self.blocks)
        )
        yield GetKvSnapshotResponse(
            incarnation=1, sequence=self.sequence, block_hashes=list(self.host), tier="host"
        )

    Session = GetStatus = GetKvSnapshot  # the index does not call these methods


@pytest.fixture
async def valkey(tmp_path: Path) -> AsyncIterator[servers.TestServer]:
    server = servers.valkey(tmp_path)
    await server.start()
    yield server
    server.close()


@pytest.fixture
async def store(valkey: servers.TestServer) -> AsyncIterator[RedisIndex]:
    store = RedisIndex(valkey.url, timeout_s=20.0)
    yield store
    await store.close()


@pytest.fixture
async def worker(bus: NatsBus) -> AsyncIterator[Worker]:
    worker = Worker("prefill-0")
    await worker.start(bus)
    yield worker
    await worker.stop()


def index(
    bus: NatsBus, valkey: servers.TestServer, max_blocks: int = 1_000_000
) -> contextlib.AbstractAsyncContextManager[Any]:
    settings = Settings(redis_url=valkey.url, lease_s=LEASE_S, resync_s=600, max_blocks=max_blocks)
    return running(settings, bus, NatsRegistry(bus, LEASE_S))


async def stored_blocks(store: RedisIndex, name: str = "prefill-0") -> frozenset[bytes] | None:
    with contextlib.suppress(Unavailable):
        found = await store.load(name)
        return found.blocks if found else None
    return None


@pytest.mark.req("S98", "S101")
async def test_deltas_reach_memory_and_redis_and_an_instance_that_leaves_is_removed_from_both(
    bus: NatsBus, valkey: servers.TestServer, store: RedisIndex, worker: Worker
) -> None:
    async with index(bus, valkey) as parts:
        await until(lambda: parts.feed.is_whole)
        await worker.store(chain(100))
        await until(lambda: parts.index.match(chain(200)) == {"prefill-0": 100})
        await until(lambda: parts.mirror.is_current)
        assert await stored_blocks(store) == set(chain(100))
        await worker.lease.release()
        await until(lambda: parts.index.num_blocks == 0)
        await until(lambda: parts.mirror.is_current)
        assert await store.instance_ids() == []
        keys = await store._redis.keys("*")
        assert keys == [b"pdmesh:v1:index:epoch"]  # no key of the instance is left (I4)


@pytest.mark.fault("F3")
@pytest.mark.req("S98")
async def test_an_instance_whose_lease_runs_out_is_removed_from_memory_and_redis(
    bus: NatsBus, valkey: servers.TestServer, store: RedisIndex, worker: Worker
) -> None:
    """A killed instance cannot remove its record. Only the end of its lease shows that it is
    gone.
    """
    async with index(bus, valkey) as parts:
        await worker.store(chain(100))
        await until(lambda: parts.index.match(chain(200)) == {"prefill-0": 100})
        await until(lambda: parts.mirror.is_current)
        assert worker.lease._task is not None
        worker.lease._task.cancel()

        async def is_gone() -> bool:
            in_memory = parts.index.match(chain(200))
            return not in_memory and await store.instance_ids() == []

        await until(is_gone)


@pytest.mark.req("S76", "S98")
async def test_the_index_follows_host_pools_and_engines_by_delta_snapshot_and_store(
    bus: NatsBus, valkey: servers.TestServer, store: RedisIndex, worker: Worker
) -> None:
    # The index is not running yet and learns of these blocks from a snapshot.
    await worker.store([], host=chain(2))
    async with index(bus, valkey) as parts:
        await until(lambda: parts.index.match(chain(9), Tier.HOST) == {"prefill-0": 2})
        await worker.store(chain(1, start=4), host=chain(2, start=2))
        await until(lambda: parts.index.match(chain(9)) == {"prefill-0": 5})
        assert parts.index.match(chain(9), Tier.ENGINE) == {}
        await until(lambda: parts.mirror.is_current)
        stored = await store.load("prefill-0")
        assert stored is not None
        assert (stored.blocks, stored.host) == (worker.blocks, worker.host)
        copy = await IndexSource(parts.view)(parts.view.records["prefill-0"])
        assert set(copy.host) == worker.host
        assert set(copy.blocks) == worker.blocks


@pytest.mark.req("S98")
async def test_blocks_dropped_from_memory_for_room_are_removed_from_redis_too(
    bus: NatsBus, valkey: servers.TestServer, store: RedisIndex, worker: Worker
) -> None:
    async with index(bus, valkey, max_blocks=50) as parts:
        await until(lambda: parts.feed.is_whole)
        for start in range(0, 200, 20):
            await worker.store(chain(20, start))
        await until(lambda: parts.index.num_evicted == 150)
        await until(lambda: parts.mirror.is_current)
        assert await stored_blocks(store, "prefill-0") == parts.index.blocks("prefill-0")
        assert parts.index.num_blocks == 50


@pytest.mark.fault("F20")
async def test_a_lost_delta_is_repaired_by_a_snapshot(
    bus: NatsBus, valkey: servers.TestServer, worker: Worker
) -> None:
    async with index(bus, valkey) as parts:
        await until(lambda: parts.feed.is_whole)
        before = worker.num_snapshots
        await worker.store(chain(3), is_lost=True)
        await worker.store(chain(3, start=3))
        await until(lambda: parts.index.match(chain(6)) == {"prefill-0": 6})
        assert worker.num_snapshots > before


@pytest.mark.fault("F20")
async def test_a_consumer_too_slow_for_the_bus_asks_for_a_snapshot(
    server: servers.TestServer,
    bus: NatsBus,
    valkey: servers.TestServer,
    worker: Worker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The consumer's queue holds at most 16 events, and 500 come at once. The bus never repeats the
    events that it drops.
    """
    monkeypatch.setattr("pdmesh.net.nats.bus._MAX_QUEUED_EVENTS", 16)
    slow = await NatsBus.connect(server.url, "slow")
    async with index(slow, valkey) as parts:
        await until(lambda: parts.feed.is_whole)
        before = worker.num_snapshots
        for start in range(500):
            await worker.store(chain(1, start))
        await (
            bus.client._flush_pending()
            # All events are in the sockets before the consumer's loop runs again.
        )
        time.sleep(0.3)
        await until(lambda: parts.index.match(chain(500)) == {"prefill-0": 500})
        assert worker.num_snapshots > before, "nothing was dropped: the test proves nothing"
    await slow.close()


@pytest.mark.fault("F15")
async def test_a_flushed_store_is_filled_again(
    bus: NatsBus, valkey: servers.TestServer, store: RedisIndex, worker: Worker
) -> None:
    async with index(bus, valkey) as parts:
        await worker.store(chain(1200))
        await until(lambda: parts.index.num_blocks == 1200)
        await until(lambda: parts.mirror.is_current)
        await store._redis.flushall()

        async def is_filled() -> bool:
            return await stored_blocks(store, "prefill-0") == worker.blocks

        await until(is_filled)


@pytest.mark.fault("F14")
async def test_without_redis_the_index_continues_and_refills_redis_when_it_is_back(
    bus: NatsBus, valkey: servers.TestServer, store: RedisIndex, worker: Worker
) -> None:
    async with index(bus, valkey) as parts:
        await worker.store(chain(10))
        await until(lambda: parts.index.num_blocks == 10)
        await until(lambda: parts.mirror.is_current)
        valkey.kill()
        await worker.store(chain(10, start=10))
        await until(lambda: parts.index.match(chain(20)) == {"prefill-0": 20})
        await until(lambda: not parts.mirror.is_current)
        await valkey.start()

        async def is_filled() -> bool:
            return await stored_blocks(store, "prefill-0") == worker.blocks

        await until(is_filled)


@pytest.mark.fault("F16")
async def test_a_frozen_redis_costs_one_bounded_wait_and_no_retries(
    valkey: servers.TestServer,
) -> None:
    timeout_s = 4.0
    store = RedisIndex(valkey.url, timeout_s=timeout_s)
    await store.instance_ids()
    valkey.pause()
    began = time.monotonic()
    with pytest.raises(Unavailable):
        await store.instance_ids()
    assert time.monotonic() - began < 2 * timeout_s, "a second try would wait as long again"
    valkey.resume()

    async def is_back() -> bool:
        with contextlib.suppress(Unavailable):
            return await store.instance_ids() == []
        return False

    await until(is_back)
    await store.close()


async def test_a_restarted_index_starts_from_redis_and_forgets_instances_that_died(
    bus: NatsBus, valkey: servers.TestServer, store: RedisIndex, worker: Worker
) -> None:
    left = StoredInstance(1, 1, frozenset(chain(4)))  # an earlier index left this behind
    await store.replace("prefill-0", left)
    await store.replace("prefill-9", left)
    await worker.store(chain(4))
    async with index(bus, valkey) as parts:
        # The index must know these blocks at once, without a snapshot.
        assert parts.index.match(chain(9)) == {"prefill-0": 4}
        await until(lambda: parts.mirror.is_current)
        assert await store.instance_ids() == ["prefill-0"]
        assert await store.load("prefill-0") == left


@pytest.mark.req("S101")
@pytest.mark.fault("F14", "F15")
async def test_a_restarted_index_over_a_wiped_store_is_rebuilt_from_the_workers(
    bus: NatsBus, valkey: servers.TestServer, store: RedisIndex, worker: Worker
) -> None:
    """This is the worst case. The index and its copy are gone, and only the instances know their
    blocks.

    The new index must also learn of blocks that were published while no index ran.
    """
    async with index(bus, valkey) as parts:
        await worker.store(chain(1000), host=chain(500, start=1000))
        await until(lambda: parts.index.num_blocks == 1500)
    await store._redis.flushall()
    await worker.store(chain(10, start=1500))
    async with index(bus, valkey) as parts:
        assert parts.feed.age_s() >= 0.0
        await until(lambda: parts.index.match(chain(2000)) == {"prefill-0": 1510})
        assert parts.feed.age_s() == 0.0

        async def is_filled() -> bool:
            stored = await store.load("prefill-0")
            return stored is not None and (stored.blocks, stored.host) == (
                worker.blocks,
                worker.host,
            )

        await until(is_filled)


@pytest.mark.fault("F20")
async def test_a_feed_that_fails_ends_its_service(
    bus: NatsBus, valkey: servers.TestServer, worker: Worker
) -> None:
    """A bug in the repair once left an index that looked healthy but never repaired itself
    again.
    """
    async with index(bus, valkey) as parts:
        await until(lambda: parts.feed.is_whole)
        parts.feed._fetch = None  # this is the bug, because a call of None raises TypeError
        parts.feed.resync_all()
        await until(parts.working.done)
        with pytest.raises(TypeError):
            parts.working.result()


async def test_redis_agrees_with_the_deltas_applied(store: RedisIndex) -> None:
    await store.apply(IndexDelta("a", 1, 1, stored=chain(5)))
    await store.apply(IndexDelta("b", 1, 1, stored=chain(2)))
    await store.apply(IndexDelta("a", 1, 2, removed=chain(1, start=3)))
    await store.apply(IndexDelta("a", 1, 3, host=TierDelta(stored=chain(2))))
    kept = frozenset([*chain(3), *chain(1, start=4)])
    assert await store.load("a") == StoredInstance(1, 3, kept, frozenset(chain(2)))
    await store.replace("a", StoredInstance(2, 7, frozenset(chain(3, start=2))))
    assert await store.load("a") == StoredInstance(2, 7, frozenset(chain(3, start=2)))
    await store.remove("a")
    assert await store.load("a") is None
    assert await store.instance_ids() == ["b"]


async def test_an_incompletely_written_instance_is_not_loaded(
    store: RedisIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.replace("a", StoredInstance(1, 1, frozenset(chain(2))))
    monkeypatch.setattr(store._redis, "sadd", AsyncMock(side_effect=ConnectionError("cut")))
    with pytest.raises(Unavailable):
        await store.replace("a", StoredInstance(1, 2, frozenset(chain(3))))
    assert await store.load("a") is None
