"""Tests how a real JetStream stores the desired state, which names the groups that a mesh should
have, and the list of instances that are out of service.
"""

from __future__ import annotations

import asyncio

import pytest

from pdmesh.errors import VersionConflict
from pdmesh.net.nats.assignments import NatsAssignments
from pdmesh.net.nats.board import out_of_service_board
from pdmesh.net.nats.bus import NatsBus
from pdmesh.net.nats.desired_store import desired_store
from pdmesh.services.master_scheduler.stored_epochs import highest_stored
from pdmesh.v1.admin_service_pb2 import LEAVE_MODE_AT_ONCE, Adjustments, OutOfService, Upgrades
from pdmesh.v1.groups_pb2 import Assignment
from tests.support.sites import servers
from tests.support.waiting import until


async def test_versions_are_numbered_kept_and_followed(bus: NatsBus) -> None:
    store = desired_store(bus)
    assert await store.version() is None
    assert await store.versions(100) == []
    seen: list[int] = []
    view = store.book()
    view.follow(lambda: seen.append(view.current.version if view.current else 0))
    for i, text in enumerate(("a: 1", "a: 2", "a: 1")):
        applied, _ = await store.apply(text, expected_version=i, author="ann", reason="because")
        assert applied.version == i + 1
    await until(lambda: seen[-1:] == [3])
    kept = [await store.version(number) for number in (0, 1, 2, 3, 9)]
    assert [v.text if v else None for v in kept] == ["a: 1", "a: 1", "a: 2", "a: 1", None]
    assert [v.version for v in await store.versions(2)] == [3, 2]
    assert [v.version for v in await view.versions(100)] == [3, 2, 1]
    await view.close()


async def test_if_two_operators_change_one_version_one_gets_an_error(bus: NatsBus) -> None:
    store = desired_store(bus)
    await store.apply("a: 1", expected_version=0, author="ann", reason="")
    with pytest.raises(VersionConflict):
        await store.apply("a: 2", expected_version=0, author="bob", reason="")
    applied, _ = await store.apply("a: 2", expected_version=None, author="bob", reason="")
    assert applied.version == 2


async def test_changes_without_a_version_succeed_one_after_another(bus: NatsBus) -> None:
    """The nemesis, a test with random faults, found this fault. Two orders came at the same moment,
    and the store refused one although neither named a version.
    """
    store = desired_store(bus)
    applied = await asyncio.gather(
        *(store.apply(f"a: {i}", expected_version=None, author="ann", reason="") for i in range(4))
    )
    assert sorted(version.version for version, _ in applied) == [1, 2, 3, 4]
    last, _ = max(applied, key=lambda each: each[0].version)
    assert (found := await store.version()) is not None
    assert found.text == last.text


@pytest.mark.fault("F18", "F21")
async def test_the_desired_state_outlives_the_store(
    bus: NatsBus, server: servers.TestServer
) -> None:
    store = desired_store(bus)
    view = store.book()
    view.follow(lambda: None)
    await store.apply("a: 1", expected_version=0, author="ann", reason="")
    await until(lambda: view.current is not None)
    server.kill()
    await server.start()
    await until(lambda: bus.is_connected)
    found = await store.version()
    assert found is not None
    assert found.text == "a: 1"
    assert view.current == found
    await view.close()


@pytest.mark.fault("F21")
async def test_a_wiped_bucket_is_noticed_and_written_back(bus: NatsBus) -> None:
    store, board = desired_store(bus), out_of_service_board(bus)
    desired, view = store.book(), board.watch(lambda _: None)
    desired.follow(lambda: None)
    await store.apply("a: 1", expected_version=0, author="ann", reason="")
    entry = OutOfService(instance_id="blank-1", mode=LEAVE_MODE_AT_ONCE, reason="ECC")
    for instance_id in ("blank-1", "blank-2"):
        await board.write(instance_id, entry)
    await until(lambda: len(view.known) == 2 and desired.current is not None)
    await board.forget("blank-2", last=view.revision("blank-2"))
    await until(lambda: list(view.known) == ["blank-1"])
    before = desired.current
    for bucket in ("pdmesh-desired", "pdmesh-out-of-service"):
        await bus.client.jetstream().delete_stream(f"KV_{bucket}")
    await until(lambda: view.missing and desired.missing)
    await until(lambda: view.is_current and desired.is_current)
    assert (view.missing, view.known) == ({"blank-1"}, {"blank-1": entry})
    await desired.restore()
    view.wrote("blank-1", entry, await board.write("blank-1", entry, last=view.revision("blank-1")))
    assert await store.version() == before
    with pytest.raises(VersionConflict):
        await board.write("blank-1", entry, last=0)
    late = board.watch(lambda _: None)
    await until(lambda: late.known == {"blank-1": entry})
    for each in (desired, view, late):
        await each.close()


async def test_an_instance_is_out_of_service_until_its_entry_is_removed(bus: NatsBus) -> None:
    board = out_of_service_board(bus)
    view = board.watch(lambda _: None)
    entry = OutOfService(instance_id="blank-1", mode=LEAVE_MODE_AT_ONCE, reason="ECC")
    await board.write("blank-1", entry)
    await until(lambda: view.known == {"blank-1": entry})
    await board.forget("blank-1")
    await until(lambda: not view.known)
    await view.close()


@pytest.mark.fault("F21")
async def test_a_change_right_after_a_wipe_takes_no_number_twice(bus: NatsBus) -> None:
    """The nemesis, a test with random faults, found this fault. After a wipe, a change came before
    the store had written the last version back. The change became version 1, although operators had
    seen higher versions.
    """
    store = desired_store(bus)
    view = store.book()
    view.follow(lambda: None)
    for i in range(3):
        await view.apply(f"a: {i}", expected_version=i, author="ann", reason="")
    await until(lambda: view.current is not None and view.current.version == 3)
    await bus.client.jetstream().delete_stream("KV_pdmesh-desired")
    with pytest.raises(VersionConflict, match="version 3 is current"):
        await view.apply("a: 3", expected_version=0, author="bob", reason="")
    applied = await view.apply("a: 3", expected_version=3, author="bob", reason="")
    assert applied.version == 4
    await until(lambda: view.current is not None and view.current.version == 4)
    await until(lambda: view.is_current)
    await view.restore()
    assert [each.text for each in await store.versions(9)] == ["a: 3", "a: 2"]
    await view.close()


@pytest.mark.fault("F21")
async def test_a_new_leader_begins_above_every_stored_epoch(bus: NatsBus) -> None:
    """Epochs number the leaderships of masters. A leader cannot overwrite an entry of a higher
    epoch.
    """
    assignments, store = NatsAssignments(bus), desired_store(bus)
    assert await highest_stored(assignments, store) == 0
    book = await assignments.book()
    await book.write(Assignment(instance_id="a", incarnation=1, epoch=3))
    await book.close()
    assert await highest_stored(assignments, store) == 3
    await store.adjust(Adjustments(epoch=5), 0)
    assert await highest_stored(assignments, store) == 5
    await store.keep_upgrades(Upgrades(epoch=8), 0)
    assert await highest_stored(assignments, store) == 8
