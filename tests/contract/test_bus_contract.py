"""The contract of `Bus`, which carries events, checked on the fake in memory and on real NATS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import pytest

from pdmesh.errors import InvalidRequest
from pdmesh.net.bus import Bus, Message
from tests.contract.nats_world import NatsServerWorld
from tests.fakes.memory_bus import MemoryBus, MemoryServer
from tests.support.waiting import until


class World(Protocol):
    async def bus(self) -> Bus: ...
    async def take_away(self) -> None: ...
    async def bring_back(self) -> None: ...


class MemoryWorld:
    def __init__(self) -> None:
        self._server = MemoryServer()

    async def bus(self) -> Bus:
        return MemoryBus(self._server)

    async def take_away(self) -> None:
        self._server.is_up = False

    async def bring_back(self) -> None:
        self._server.restore()


class NatsWorld(NatsServerWorld):
    async def bus(self) -> Bus:
        return await self.connect()


@pytest.fixture(params=["memory", "nats"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    if request.param == "memory":
        yield MemoryWorld()
        return
    async with NatsWorld(tmp_path) as nats_world:
        yield nats_world


class Inbox:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.num_gaps = 0

    async def take(self, message: Message) -> None:
        self.messages.append(message)

    def gap(self) -> None:
        self.num_gaps += 1


async def test_events_arrive_in_order_with_their_headers(world: World) -> None:
    sender, receiver, inbox = await world.bus(), await world.bus(), Inbox()
    await receiver.subscribe("mesh.v1.health.instance.*", inbox.take)
    await _settled(sender, receiver)
    for i in range(100):
        await sender.publish("mesh.v1.health.instance.p0", str(i).encode(), {"n": str(i)})
    await until(lambda: len(inbox.messages) == 100)
    assert [m.data for m in inbox.messages] == [str(i).encode() for i in range(100)]
    assert inbox.messages[7].headers["n"] == "7"
    await sender.close()
    await receiver.close()


async def test_a_subscription_gets_only_the_subjects_that_match_its_pattern(world: World) -> None:
    bus, one, everything = await world.bus(), Inbox(), Inbox()
    await bus.subscribe("mesh.v1.kv.blocks.*", one.take)
    await bus.subscribe("mesh.v1.>", everything.take)
    await bus.publish("mesh.v1.kv.blocks.p0", b"a")
    await bus.publish("mesh.v1.load.instance.p0", b"b")
    await until(lambda: len(everything.messages) == 2)
    assert [m.data for m in one.messages] == [b"a"]
    await bus.close()


async def test_a_handler_that_fails_still_gets_the_next_event(world: World) -> None:
    bus, inbox = await world.bus(), Inbox()

    async def fail_once(message: Message) -> None:
        await inbox.take(message)
        if len(inbox.messages) == 1:
            raise ValueError("first")

    await bus.subscribe("mesh.v1.health.instance.*", fail_once)
    for _ in range(2):
        await bus.publish("mesh.v1.health.instance.p0", b"")
    await until(lambda: len(inbox.messages) == 2)
    await bus.close()


@pytest.mark.parametrize("pattern", ["", "health events", "mesh..x"])
async def test_an_invalid_subject_cannot_be_subscribed_to(world: World, pattern: str) -> None:
    bus = await world.bus()
    with pytest.raises(InvalidRequest) as refused:
        await bus.subscribe(pattern, Inbox().take)
    assert (refused.value.field, repr(pattern) in refused.value.message) == ("pattern", True)
    await bus.close()


async def test_nothing_arrives_after_unsubscribe(world: World) -> None:
    bus, gone, stays = await world.bus(), Inbox(), Inbox()
    subscription = await bus.subscribe("mesh.v1.health.instance.*", gone.take)
    await bus.subscribe("mesh.v1.health.instance.*", stays.take)
    await subscription.unsubscribe()
    await bus.publish("mesh.v1.health.instance.p0", b"")
    await until(lambda: stays.messages)
    assert gone.messages == []
    await bus.close()


@pytest.mark.fault("F18")
async def test_an_outage_loses_events_reports_the_gap_and_replays_nothing(world: World) -> None:
    """Events published during the outage must not arrive late, after the server is back."""
    bus, inbox = await world.bus(), Inbox()
    await bus.subscribe("mesh.v1.health.instance.*", inbox.take, on_gap=inbox.gap)
    await bus.publish("mesh.v1.health.instance.p0", b"before")
    await until(lambda: inbox.messages)
    await world.take_away()
    await until(lambda: not bus.is_connected)
    for _ in range(10):
        await bus.publish("mesh.v1.health.instance.p0", b"lost")
    await world.bring_back()
    await until(lambda: bus.is_connected and inbox.num_gaps)
    await bus.publish("mesh.v1.health.instance.p0", b"after")
    await until(lambda: len(inbox.messages) == 2)
    assert [m.data for m in inbox.messages] == [b"before", b"after"]
    await bus.close()


async def _settled(sender: Bus, receiver: Bus) -> None:
    """Wait until the server knows the receiver's subscriptions.

    The server knows them when a later subscription of the receiver gets an event.
    """
    heard = asyncio.Event()

    async def hear(_: Message) -> None:
        heard.set()

    subscription = await receiver.subscribe("mesh.v1.error.reported.*", hear)
    while not heard.is_set():
        await sender.publish("mesh.v1.error.reported.test", b"")
        await asyncio.sleep(0.005)
    await subscription.unsubscribe()
