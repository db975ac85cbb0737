"""Tests which peers an instance asks for KV blocks. It asks for blocks in the host pools of peers
that the index names. These peers must be in its own region unless its group spans regions (S58,
S77).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdmesh.core.kv.transfer.source_exclusions import ExcludedSource, KvSource, SourceFault
from pdmesh.kv.tiers.peer_lookup import PeerLookup
from pdmesh.net.convert.source_exclusions import excluded_to_proto
from pdmesh.net.grpc import rpc
from pdmesh.v1 import kv_index_service_pb2 as pb
from pdmesh.v1.common_pb2 import InstanceRecord
from tests.fakes.memory_registry import MemoryRegistry, MemoryStore
from tests.support.waiting import until

HASHES = (b"a" * 16, b"b" * 16)


class Index:
    """An index that knows three other holders of both blocks. It also names one holder in an
    incarnation that is not the registered one.
    """

    async def Match(self, request: pb.MatchRequest, context: object) -> pb.MatchResponse:
        assert request.tier == "host"
        holders = (("me", 1), ("eu-0", 1), ("us-0", 1), ("any-0", 1), ("eu-1", 7))
        return pb.MatchResponse(
            matches=[
                pb.PrefixMatch(instance_id=i, incarnation=incarnation, num_blocks=2)
                for i, incarnation in holders
            ]
        )

    async def Snapshot(self, request: pb.SnapshotRequest, context: object) -> None:
        raise NotImplementedError


@asynccontextmanager
async def index() -> AsyncIterator[str]:
    server = rpc.server()
    rpc.add_service(server, pb.DESCRIPTOR.services_by_name["KvIndexService"], Index())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.mark.req("S58", "S77")
@pytest.mark.parametrize(
    ("kv_region", "asked"), [("eu", ["eu-0"]), ("us", ["us-0"]), ("", ["any-0"])]
)
async def test_blocks_are_fetched_only_from_pools_in_the_same_region(
    kv_region: str, asked: list[str]
) -> None:
    async with index() as address:
        store = MemoryStore()
        store.records["index"] = InstanceRecord(
            instance_id="index", service="kv-cache-index", grpc_address=address
        )
        regions = {"me": kv_region, "eu-0": "eu", "us-0": "us", "any-0": "", "eu-1": "eu"}
        for name, region in regions.items():
            store.records[name] = InstanceRecord(
                instance_id=name, incarnation=1, kv_region=region, kv_addresses=["ucx:1"]
            )
        directory = PeerLookup("me")
        await directory.read(MemoryRegistry(store))

        async def found() -> list[str]:
            return [h.instance_id for h in await directory.find(HASHES, 0)]

        await until(found)  # on a slow machine, the first answer may come too late and is ignored
        assert await found() == asked
        await directory.close()


@pytest.mark.fault("F34")
async def test_a_peer_that_this_instance_ejects_is_not_asked() -> None:
    """The instance has ejected one peer in its registered incarnation, and another peer in an
    incarnation that is not registered. A third peer was unreachable, so the instance only avoids it
    and does not eject it. The instance must still ask the second and the third peer.
    """
    async with index() as address:
        store = MemoryStore()
        store.records["index"] = InstanceRecord(
            instance_id="index", service="kv-cache-index", grpc_address=address
        )
        for name in ("me", "eu-0", "us-0", "any-0"):
            store.records[name] = InstanceRecord(
                instance_id=name, incarnation=1, kv_addresses=["ucx:1"]
            )
        held = [("eu-0", 1, SourceFault.CORRUPT), ("us-0", 2, SourceFault.CORRUPT)]
        held += [("any-0", 1, SourceFault.UNREACHABLE)]
        store.records["me"].excluded_kv_sources.extend(
            excluded_to_proto(ExcludedSource(KvSource(name, incarnation), fault))
            for name, incarnation, fault in held
        )
        directory = PeerLookup("me")
        await directory.read(MemoryRegistry(store))

        async def found() -> list[str]:
            return [h.instance_id for h in await directory.find(HASHES, 0)]

        await until(found)  # on a slow machine, the first answer may come too late and is ignored
        assert await found() == ["us-0", "any-0"]
        await directory.close()
