"""A client may name an adapter instead of a model.

A board that the leading master writes says which content (digest) the name stands for.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdmesh.errors import ModelNotFound
from pdmesh.net.nats.board import Board
from pdmesh.services.gateway.routing.adapter_names import AdapterNames
from pdmesh.services.gateway.routing.fleet import FleetView, MeshView
from pdmesh.v1.admin_service_pb2 import RegisteredAdapter
from pdmesh.v1.common_pb2 import INSTANCE_PHASE_READY, ROLE_FUSION, InstanceRecord
from tests.fakes.kv.memory_kv import MemoryBucket
from tests.fakes.memory_registry import MemoryStore, MemoryView


class Site:
    def __init__(self) -> None:
        bucket: Any = MemoryBucket()  # a fake in place of a KvBucket
        self.bucket = bucket
        self.board = Board(bucket, RegisteredAdapter)
        self.names = AdapterNames()
        self.names.watch(self.board)
        self._open()
        store = MemoryStore()
        store.records["fusion-0"] = InstanceRecord(
            instance_id="fusion-0",
            incarnation=1,
            role=ROLE_FUSION,
            phase=INSTANCE_PHASE_READY,
            model="base",
            max_adapters=1,
            unsupported_shaping=["min_p"],
            max_model_len=77,
        )
        view = MeshView(MemoryView(store), adapters=self.names)
        self.fleet = FleetView(view, "", lambda: 0.0)

    def _open(self) -> None:
        for watch in self.bucket.watches:
            watch.open()

    async def add(self, name: str, digest: str, model: str = "base") -> None:
        entry = RegisteredAdapter(name=name, digest=digest, model=model, path=f"/{digest}")
        await self.board.write(name, entry)
        await asyncio.sleep(0)


async def test_a_registered_adapter_is_a_model_that_instances_of_another_one_serve() -> None:
    site = Site()
    await site.add("sql", "d1")
    await site.add("lost", "d2", model="unknown")
    await site.add("base", "d3")
    fleet = site.fleet
    listed = [(m.name, m.parent, m.max_model_len) for m in fleet.models()]
    assert listed == [("base", None, 77), ("sql", "base", 77)], "a model's name is no adapter's"
    assert fleet.model_name("sql") == "sql"
    assert fleet.model_name("default") == "base"
    assert (fleet.base_model("sql"), fleet.base_model("base")) == ("base", "base")
    reference = fleet.reference("sql")
    assert reference is not None
    assert reference.max_model_len == 77
    assert fleet.unsupported_shaping("sql") == {"min_p"}
    with pytest.raises(ModelNotFound):
        fleet.model_name("lost")
    assert fleet.adapted("base") is None


async def test_the_content_follows_the_board_and_a_removed_name_is_unknown() -> None:
    site = Site()
    await site.add("sql", "d1")
    before = site.fleet.adapted("sql")
    await site.add("sql", "d2")
    after = site.fleet.adapted("sql")
    assert before is not None
    assert after is not None
    assert (before.adapter.digest, after.adapter.digest, after.adapter.path) == ("d1", "d2", "/d2")
    await site.board.forget("sql")
    await asyncio.sleep(0)
    assert [m.name for m in site.fleet.models()] == ["base"]
    with pytest.raises(ModelNotFound):
        site.fleet.model_name("sql")
