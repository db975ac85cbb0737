"""Pulls that are given up, or lose their peer, in the moment when nobody looks: no landing range may be lost (S49)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pdmesh.core.arena import ArenaRange
from pdmesh.core.kv_layout import KvLayout
from pdmesh.core.ticket import PullFailure, Ticket
from pdmesh.errors import KvTransferFailed
from pdmesh.kv.agent import AgentEvent, AgentIdentity, KvAgent, LandingFreed, PullResult
from pdmesh.kv.agent_thread import AgentThread
from pdmesh.kv.transport import KvConnection
from tests.fakes.kv_pair import FINGERPRINT, INCARNATION, kv_pair, ticket_for
from tests.fakes.memory_transport import MemoryTransport

LAYOUT = KvLayout(4, 2, 512, FINGERPRINT)
LANDING = ArenaRange(4096, LAYOUT.total_bytes)


class DyingPeerTransport(MemoryTransport):
    """Whoever it connects to dies right after the handshake."""

    async def connect(self, address: str, timeout_s: float) -> KvConnection:
        connection = await super().connect(address, timeout_s)
        connection.abort("the peer is gone")
        return connection


@pytest.mark.fault("F2")
async def test_a_peer_that_dies_as_the_connection_opens_fails_the_pull_at_once() -> None:
    """Its end is told before the puller, who waited for the connection, runs again: nothing would ever end the pull."""
    async with kv_pair(DyingPeerTransport) as pair:
        pair.stage(LAYOUT, lease_s=0.1)
        ticket = ticket_for(pair.address, LAYOUT)
        with pytest.raises(KvTransferFailed) as caught:
            await asyncio.wait_for(pair.receiver.pull(ticket, LANDING, deadline_s=0.2), 1)
        assert caught.value.reason == PullFailure.PEER_LOST
        assert pair.receiver_events == [LandingFreed(LANDING.offset)]
        assert pair.receiver.num_pulls == 0


class InstantAgent(KvAgent):
    """Its pulls succeed at once; `at_end` is called as they do."""

    at_end: Callable[[], None] = staticmethod(lambda: None)

    async def pull(self, ticket: Ticket, landing: ArenaRange, **_: Any) -> PullResult:
        self.at_end()
        return PullResult(landing.length, 0.0)


class Events(list[AgentEvent]):
    """What the agent said, for another thread to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.has_some = threading.Event()

    def add(self, event: AgentEvent) -> None:
        self.append(event)
        self.has_some.set()


@contextmanager
def agent_thread(events: Events) -> Iterator[tuple[AgentThread, InstantAgent]]:
    agents: list[InstantAgent] = []

    def make() -> KvAgent:
        identity = AgentIdentity("decode-0", INCARNATION, FINGERPRINT)
        agent = InstantAgent(
            MemoryTransport(),
            identity,
            staging_bytes=0,
            landing_bytes=1 << 16,
            on_event=events.add,
        )
        agents.append(agent)
        return agent

    thread = AgentThread(make)
    thread.start()
    try:
        yield thread, agents[0]
    finally:
        thread.close()


TICKET = ticket_for("memory:nobody", LAYOUT)


@pytest.mark.fault("F27")
def test_a_pull_cancelled_before_its_thread_got_to_it_gives_its_landing_back() -> None:
    """The agent is busy with the checksum of a long prompt when the client leaves."""
    events = Events()
    with agent_thread(events) as (thread, agent):
        is_free = threading.Event()
        agent.post(lambda: assert_(is_free.wait(5)))
        pull = thread.pull(TICKET, LANDING, deadline_s=1)
        assert pull.cancel()
        is_free.set()
        assert events.has_some.wait(2)
        assert events == [LandingFreed(LANDING.offset)]


@pytest.mark.fault("F27")
def test_a_pull_cancelled_as_it_succeeds_gives_its_landing_back() -> None:
    """The bytes are the caller's by then, and the caller has turned away."""
    events = Events()
    with agent_thread(events) as (thread, agent):
        has_pull = threading.Event()

        def turn_away() -> None:
            assert_(has_pull.wait(5))
            assert_(pull.cancel())

        agent.at_end = turn_away
        pull = thread.pull(TICKET, LANDING, deadline_s=1)
        has_pull.set()
        assert events.has_some.wait(2)
        assert events == [LandingFreed(LANDING.offset)]


def test_a_pull_nobody_cancelled_keeps_its_landing() -> None:
    events = Events()
    with agent_thread(events) as (thread, _):
        assert thread.pull(TICKET, LANDING, deadline_s=1).result(5).num_bytes == LANDING.length
    assert events == []


def assert_(holds: bool) -> None:
    assert holds


async def test_a_range_that_its_taker_cannot_take_ends_that_pull_and_no_other() -> None:
    def on_range(*_: object) -> None:
        raise ValueError("no room")

    async with kv_pair(MemoryTransport) as pair:
        pair.stage(LAYOUT)
        ticket = ticket_for(pair.address, LAYOUT)
        async with asyncio.timeout(5):
            with pytest.raises(ValueError, match="no room"):
                await pair.receiver.pull(ticket, LANDING, deadline_s=2, on_range=on_range)
        assert pair.receiver_events == [LandingFreed(LANDING.offset)]
        assert pair.receiver.num_pulls == 0
