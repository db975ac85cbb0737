"""The client's event stream: the subjects of a domain, and the events that a reader gets."""

from __future__ import annotations

import asyncio

import pytest

from pdmesh.client.events import MeshEvent, follow, patterns
from pdmesh.errors import InvalidRequest
from pdmesh.events.v1.events_pb2 import GroupStep, InstanceHealth
from pdmesh.net import subjects
from pdmesh.net.bus import Handler
from pdmesh.net.events import EventPublisher
from tests.fakes.memory_bus import MemoryBus


def test_a_domain_is_all_its_subjects_and_none_means_all() -> None:
    assert patterns(["group", "kv", "group"]) == ["mesh.v1.group.>", "mesh.v1.kv.>"]
    assert patterns([]) == ["mesh.v1.>"]
    with pytest.raises(InvalidRequest, match="there is no grup") as refused:
        patterns(["grup"])
    assert refused.value.field == "domains"


class GappyBus(MemoryBus):
    """A bus that reports lost events before the first one that arrives."""

    async def subscribe(self, pattern: str, handler: Handler, *, on_gap=None):  # type: ignore[no-untyped-def]
        on_gap()
        return await super().subscribe(pattern, handler, on_gap=on_gap)


async def test_a_reader_gets_typed_events_without_heartbeats_and_knows_of_losses() -> None:
    bus = GappyBus()
    stream = follow(bus, ["group", "health"])
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    publisher = EventPublisher(bus, "master-scheduler", 7)
    await publisher.publish(subjects.health_instance("p-0"), InstanceHealth())
    await bus.publish(subjects.group_step("broken"), b"{")
    for step in ("joined", "left"):
        await publisher.publish(subjects.group_step("chat"), GroupStep(group_id="chat", step=step))
    found: list[MeshEvent] = [await first, await anext(stream)]
    await stream.aclose()  # type: ignore[attr-defined]
    assert [event.lost_before for event in found] == [True, False]
    assert {(event.domain, event.about) for event in found} == {("group", "chat")}
    messages = [event.message for event in found]
    assert [m.step for m in messages if isinstance(m, GroupStep)] == ["joined", "left"]
