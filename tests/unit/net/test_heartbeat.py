"""A process sends its first heartbeat at once, and the others at fixed intervals."""

from __future__ import annotations

import asyncio

import pytest

from pdmesh.events.v1.events_pb2 import InstanceHealth
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import EventPublisher, decode_event
from pdmesh.net.heartbeat import Presence
from pdmesh.v1.common_pb2 import InstanceRecord
from tests.fakes.memory_bus import MemoryBus
from tests.fakes.memory_registry import MemoryRegistry
from tests.support.waiting import until


async def heard(lease_s: float, num_expected: int) -> list[InstanceHealth]:
    bus = MemoryBus()
    beats: list[InstanceHealth] = []

    async def on_beat(message: Message) -> None:
        beats.append(decode_event(message, InstanceHealth))

    await bus.subscribe(subjects.health_instance("p"), on_beat)
    publisher = EventPublisher(bus, "p", 1)
    presence = Presence(MemoryRegistry(lease_s=lease_s), publisher, lease_s=lease_s)
    await presence.start(lambda: InstanceRecord(instance_id="p", incarnation=1, service="prefill"))
    await until(lambda: len(beats) >= num_expected)
    for _ in range(20):
        await asyncio.sleep(0)
    await presence.stop()
    return beats


@pytest.mark.req("S18")
async def test_the_first_heartbeat_is_sent_at_once_and_the_second_after_a_period() -> None:
    beats = await heard(3 * 3600.0, 1)
    assert [(beat.service, beat.is_ready) for beat in beats] == [("prefill", True)]


@pytest.mark.req("S18")
async def test_reports_continue_at_the_period_that_the_lease_sets() -> None:
    beats = await heard(0.03, 6)
    assert len(beats) >= 6
