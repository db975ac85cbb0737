"""The process of a kv-cache-index, which knows which KV blocks each instance has cached."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import structlog

import pdmesh
from pdmesh.core.kv.prefix.prefix_index import PrefixIndex
from pdmesh.kv.index.feed import IndexFeed
from pdmesh.kv.index.pinned import PinFollower, all_names
from pdmesh.kv.index.redis_index import RedisIndex
from pdmesh.kv.index.snapshot_sources import InstanceSource
from pdmesh.net.addresses import join
from pdmesh.net.events import EventPublisher
from pdmesh.net.grpc import rpc
from pdmesh.net.heartbeat import Presence
from pdmesh.net.nats.board import pin_board
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.net.registry import RegistryView
from pdmesh.net.tasks import end, together
from pdmesh.service_process import App, run
from pdmesh.services.kv_cache_index.mirror import RedisMirror
from pdmesh.services.kv_cache_index.servicer import KvIndexServicer
from pdmesh.services.kv_cache_index.settings import Settings
from pdmesh.telemetry import metrics, names
from pdmesh.v1 import kv_index_service_pb2
from pdmesh.v1.common_pb2 import InstanceRecord

log = structlog.get_logger(__name__)


@dataclass
class KvCacheIndex:
    """The parts of a running index."""

    index: PrefixIndex
    feed: IndexFeed
    mirror: RedisMirror
    view: RegistryView
    working: asyncio.Task[None]  # runs feed and mirror, and ends only if one of them fails


@contextlib.asynccontextmanager
async def running(
    settings: Settings, bus: NatsBus, registry: NatsRegistry
) -> AsyncIterator[KvCacheIndex]:
    """A context manager that follows the instances and keeps Redis up to date."""
    view = await registry.watch()
    index = PrefixIndex(max_blocks=settings.max_blocks)
    store = RedisIndex(settings.redis_url, settings.redis_timeout_s)
    source = InstanceSource(view)
    mirror = RedisMirror(index, store)
    num_loaded = await mirror.restore({i: r.incarnation for i, r in view.records.items()})
    log.info("index.restored", num_instances=num_loaded, num_blocks=index.num_blocks)
    feed = IndexFeed(index, bus, view, source, follower=mirror, resync_s=settings.resync_s)
    await feed.start()
    feed.resync_all()  # the copy in Redis may be old
    pins = PinFollower(pin_board(bus), lambda known: index.pin(all_names(known)))
    working = asyncio.create_task(together(feed.run(), mirror.run()), name="index-work")
    try:
        yield KvCacheIndex(index, feed, mirror, view, working)
    finally:
        await end([working])
        await pins.close()
        await feed.stop()
        await source.close()
        await store.close()
        await view.close()


async def serve(settings: Settings, app: App) -> None:
    bus = await app.unless_stopping(
        NatsBus.connect(settings.nats_url, settings.instance_id, settings.num_nats_replicas)
    )
    registry = NatsRegistry(bus, settings.lease_s)
    async with running(settings, bus, registry) as parts:
        server, port = await _listen(settings, parts.index)
        _observe(parts)
        app.add_readiness("serving", lambda: True)
        presence = Presence(
            registry,
            EventPublisher(bus, app.instance_id, app.incarnation),
            lease_s=settings.lease_s,
            is_ready=lambda: not app.not_ready(),
            on_replaced=app.stopping.set,
        )
        record = InstanceRecord(
            instance_id=app.instance_id,
            incarnation=app.incarnation,
            service=app.service,
            grpc_address=join(settings.reachable_host, port),
            ops_address=app.ops_address,
            version=pdmesh.__version__,
            pid=os.getpid(),
        )
        await app.unless_stopping(presence.start(lambda: record))
        await app.until_stopping(parts.working)
        await presence.stop()
        await server.stop(1.0)
    await bus.close()


async def _listen(settings: Settings, index: PrefixIndex) -> tuple[grpc.aio.Server, int]:
    server = rpc.server()
    service = kv_index_service_pb2.DESCRIPTOR.services_by_name["KvIndexService"]
    rpc.add_service(server, service, KvIndexServicer(index))
    port = rpc.listen(server, join(settings.inner_host, settings.grpc_port))
    await server.start()
    return server, port


def _observe(parts: KvCacheIndex) -> None:
    index = parts.index
    metrics.gauge(
        names.INDEX_BLOCKS, "Blocks indexed, over all instances", lambda: index.num_blocks
    )
    metrics.total(
        names.INDEX_EVICTED, "Entries dropped for lack of room", lambda: index.num_evicted
    )
    metrics.gauge(
        names.INDEX_AGE,
        "How long the worst instance has had missing deltas; 0: none are missing",
        parts.feed.age_s,
        "s",
    )
    metrics.gauge(
        names.INDEX_STORE_PENDING,
        "Instances not yet written to Redis",
        lambda: parts.mirror.num_pending,
    )
    metrics.gauge(
        names.INDEX_STORE_UP,
        "1 while Redis accepts writes",
        lambda: parts.mirror.is_store_up,
    )
    metrics.gauge(
        names.REGISTRY_RECORDS, "Records in the registry view", lambda: len(parts.view.records)
    )


def main() -> None:
    run("kv-cache-index", Settings, serve)


if __name__ == "__main__":
    main()
