"""The contract of `Registry`, checked on the fake in memory and on real JetStream.

The registry has the records of all live processes, under leases.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import pytest

from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.registry import NatsRegistry
from pdmesh.net.registry import RecordChanged, Registry
from pdmesh.v1.common_pb2 import ROLE_PREFILL, InstanceRecord
from tests.contract.nats_world import NatsServerWorld
from tests.fakes.memory_registry import MemoryRegistry, MemoryStore
from tests.support.waiting import until

LEASE_S = 3.0  # longer than a busy machine may stall


class World(Protocol):
    async def registry(self) -> Registry: ...
    async def crash(self, registry: Registry) -> None: ...
    async def take_away(self) -> None: ...
    async def bring_back(self) -> None: ...


class MemoryWorld:
    def __init__(self) -> None:
        self._store = MemoryStore()

    async def registry(self) -> Registry:
        return MemoryRegistry(self._store, LEASE_S)

    async def crash(self, registry: Registry) -> None:
        assert isinstance(registry, MemoryRegistry)
        registry.crash()

    async def take_away(self) -> None:
        self._store.is_up = False

    async def bring_back(self) -> None:
        self._store.is_up = True


class NatsWorld(NatsServerWorld):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._bus_of: dict[Registry, NatsBus] = {}

    async def registry(self) -> Registry:
        bus = await self.connect()
        registry = NatsRegistry(bus, LEASE_S)
        self._bus_of[registry] = bus
        return registry

    async def crash(self, registry: Registry) -> None:
        await self._bus_of[registry].close()  # its leases can no longer be renewed


@pytest.fixture(params=["memory", "nats"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    if request.param == "memory":
        yield MemoryWorld()
        return
    async with NatsWorld(tmp_path) as nats_world:
        yield nats_world


def record(
    instance_id: str = "prefill-0", incarnation: int = 1, **fields: object
) -> InstanceRecord:
    return InstanceRecord(
        instance_id=instance_id,
        incarnation=incarnation,
        service="prefill",
        role=ROLE_PREFILL,
        **fields,  # type: ignore[arg-type]
    )


@pytest.mark.req("S12")
async def test_a_view_starts_with_what_is_registered(world: World) -> None:
    owner, other = await world.registry(), await world.registry()
    lease = await owner.register(record(incarnation=2**63 + 5, kv_addresses=["a:1", "b:2"]))
    view = await other.watch()
    assert view.is_connected
    assert view.records["prefill-0"] == record(incarnation=2**63 + 5, kv_addresses=["a:1", "b:2"])
    assert lease.is_held
    await lease.release()
    await view.close()


async def test_a_view_of_an_empty_registry_is_ready_at_once(world: World) -> None:
    view = await (await world.registry()).watch()
    assert dict(view.records) == {}
    await view.close()


@pytest.mark.req("S12")
async def test_changes_arrive_in_order_and_a_deleted_record_differs_from_an_expired_lease(
    world: World,
) -> None:
    owner, other = await world.registry(), await world.registry()
    view = await other.watch()
    seen: list[RecordChanged] = []
    view.on_change(seen.append)
    lease = await owner.register(record())
    # otherwise, a slow view may get only the last of several changes
    await until(lambda: len(seen) == 1)
    await lease.update(record(is_draining=True))
    await until(lambda: len(seen) == 2)
    await lease.release()
    await until(lambda: len(seen) == 3)
    assert seen == [
        RecordChanged("prefill-0", record()),
        RecordChanged("prefill-0", record(is_draining=True)),
        RecordChanged("prefill-0", None, is_lease_end=False),
    ]
    assert not lease.is_held
    await view.close()


@pytest.mark.req("S70")
async def test_a_record_that_is_not_renewed_vanishes_by_itself(world: World) -> None:
    owner, other = await world.registry(), await world.registry()
    view = await other.watch()
    seen: list[RecordChanged] = []
    lease = await owner.register(record())
    await until(lambda: "prefill-0" in view.records)
    # The owner renews its lease, so the record stays.
    with pytest.raises(AssertionError):
        await until(lambda: "prefill-0" not in view.records, within_s=2 * LEASE_S)
    view.on_change(seen.append)
    await world.crash(owner)
    await until(lambda: seen)
    assert seen == [RecordChanged("prefill-0", None, is_lease_end=True)]
    await until(lambda: not lease.is_held)
    await view.close()


@pytest.mark.fault("F5")
async def test_a_new_incarnation_takes_the_id_and_the_old_one_learns_it(world: World) -> None:
    old, new = await world.registry(), await world.registry()
    old_lease = await old.register(record(incarnation=1))
    new_lease = await new.register(record(incarnation=2))
    await until(lambda: old_lease.was_replaced)
    assert not old_lease.is_held
    await old_lease.release()  # this must not remove the new incarnation's record
    view = await new.watch()
    assert view.records["prefill-0"].incarnation == 2
    assert new_lease.is_held
    assert not new_lease.was_replaced
    await new_lease.release()
    await view.close()


@pytest.mark.fault("F18")
async def test_no_process_is_declared_dead_because_of_an_outage_of_the_store(world: World) -> None:
    """The outage is longer than every lease. An owner that still lives registers again."""
    owner, dying, other = [await world.registry() for _ in range(3)]
    lease = await owner.register(record())
    await dying.register(record("decode-0"))
    view = await other.watch()
    seen: list[RecordChanged] = []
    view.on_change(seen.append)
    await world.take_away()
    await until(lambda: not view.is_connected)
    await world.crash(dying)
    with pytest.raises(AssertionError):
        await until(lambda: len(view.records) < 2, within_s=2.5 * LEASE_S)
    await world.bring_back()
    await until(lambda: view.is_connected)
    await until(lambda: lease.is_held)
    await until(lambda: "decode-0" not in view.records)
    assert seen == [RecordChanged("decode-0", None, is_lease_end=True)]
    assert list(view.records) == ["prefill-0"]
    await lease.release()
    await view.close()
