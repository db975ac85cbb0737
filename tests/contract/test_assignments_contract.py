"""The contract of `Assignments`, checked on the fake in memory and on real JetStream.

An assignment is a master's order to an instance.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import pytest

from pdmesh.errors import NotLeader, Unavailable
from pdmesh.net.assignments import Assignments, StaleView
from pdmesh.net.nats.assignments import NatsAssignments
from pdmesh.v1.common_pb2 import ROLE_PREFILL
from pdmesh.v1.groups_pb2 import STAGE_CONNECT, STAGE_LOAD, STAGE_SERVE, Assignment
from tests.contract.nats_world import NatsServerWorld
from tests.fakes.memory_assignments import MemoryAssignments, MemoryAssignmentStore
from tests.support.waiting import until


class World(Protocol):
    async def party(self) -> Assignments: ...
    async def take_away(self) -> None: ...
    async def bring_back(self) -> None: ...


class MemoryWorld:
    def __init__(self) -> None:
        self._store = MemoryAssignmentStore()

    async def party(self) -> Assignments:
        return MemoryAssignments(self._store)

    async def take_away(self) -> None:
        self._store.is_up = False

    async def bring_back(self) -> None:
        self._store.come_back()


class NatsWorld(NatsServerWorld):
    async def party(self) -> Assignments:
        return NatsAssignments(await self.connect())


@pytest.fixture(params=["memory", "nats"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    if request.param == "memory":
        yield MemoryWorld()
        return
    async with NatsWorld(tmp_path) as nats_world:
        yield nats_world


def assignment(epoch: int = 1, stage: int = STAGE_LOAD, **fields: object) -> Assignment:
    values: dict[str, object] = {
        "instance_id": "blank-0",
        "incarnation": 2**63 + 1,
        "assignment_id": 1,
        "role": ROLE_PREFILL,
        "group_id": "chat",
        "engine_options": {"num_slots": "4"},
    }
    return Assignment(epoch=epoch, stage=stage, **(values | fields))  # type: ignore[arg-type]


async def test_a_written_assignment_is_known_at_once_and_reaches_the_instance(world: World) -> None:
    book, instance = await (await world.party()).book(), await world.party()
    await book.write(assignment())
    assert book.known == {"blank-0": assignment()}
    told: list[Assignment] = []
    feed = instance.follow("blank-0", told.append)
    other: list[Assignment] = []
    other_feed = instance.follow("blank-1", other.append)
    await until(lambda: told == [assignment()])
    await book.write(assignment(stage=STAGE_CONNECT))
    await until(lambda: told[-1] == assignment(stage=STAGE_CONNECT))
    assert other == []
    await feed.close()
    await other_feed.close()
    await book.close()


@pytest.mark.fault("F13")
async def test_a_leader_of_an_earlier_epoch_is_refused(world: World) -> None:
    old = await (await world.party()).book()
    await old.write(assignment(epoch=1))
    new = await (await world.party()).book()
    await new.write(assignment(epoch=2))
    with pytest.raises(NotLeader):
        await old.write(assignment(epoch=1, stage=STAGE_SERVE))
    with pytest.raises(NotLeader):
        await old.forget("blank-0", epoch=1)
    assert new.known["blank-0"] == assignment(epoch=2)
    await old.close()
    await new.close()


async def test_a_decision_from_a_stale_view_is_not_written(world: World) -> None:
    """A book that has not seen the assignment knows no epoch. Then the key's revision decides."""
    first = await (await world.party()).book()
    second = await (await world.party()).book()
    await first.write(assignment())
    with pytest.raises((StaleView, NotLeader)):
        await second.write(assignment(epoch=0))
    await until(lambda: second.known == {"blank-0": assignment()})
    await second.write(assignment(epoch=2))
    await until(lambda: first.known == {"blank-0": assignment(epoch=2)})
    await first.close()
    await second.close()


async def test_a_forgotten_assignment_is_gone_and_can_be_written_again(world: World) -> None:
    book, other = await (await world.party()).book(), await (await world.party()).book()
    changes: list[int] = []
    other.on_change(lambda: changes.append(len(other.known)))
    await book.write(assignment())
    await until(lambda: changes == [1])
    await book.forget("blank-0", epoch=1)
    assert dict(book.known) == {}
    await until(lambda: changes == [1, 0])
    await book.forget("blank-0", epoch=1)
    await book.write(assignment(assignment_id=2))
    await until(lambda: other.known == {"blank-0": assignment(assignment_id=2)})
    await book.close()
    await other.close()


@pytest.mark.fault("F18")
async def test_an_outage_changes_no_assignment_and_the_book_reports_it(world: World) -> None:
    book, instance = await (await world.party()).book(), await world.party()
    told: list[Assignment] = []
    feed = instance.follow("blank-0", told.append)
    await book.write(assignment())
    await until(lambda: told)
    await world.take_away()
    await until(lambda: not book.is_current)
    with pytest.raises(Unavailable):
        await book.write(assignment(stage=STAGE_CONNECT))
    assert book.known == {"blank-0": assignment()}
    told.clear()
    await world.bring_back()
    await until(lambda: book.is_current)
    await until(lambda: told)
    await book.write(assignment(stage=STAGE_CONNECT))
    await until(lambda: told[-1].stage == STAGE_CONNECT)
    await feed.close()
    await book.close()
