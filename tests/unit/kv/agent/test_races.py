"""A pull is given up or loses its peer at the worst moment. No landing range may be lost (S49).

A landing is the memory range that a pull writes to.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pdmesh.core.instance.arena import ArenaRange
from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.core.kv.transfer.ticket import PullFailure, Ticket
from pdmesh.errors import KvTransferFailed
from pdmesh.kv.agent import receiver as agent_receiver
from pdmesh.kv.agent import staged
from pdmesh.kv.agent.agent import KvAgent
from pdmesh.kv.agent.arena_memory import host_memory
from pdmesh.kv.agent.thread import AgentThread
from pdmesh.kv.agent.types import (
    AgentEvent,
    AgentIdentity,
    AgentLandingFreed,
    AgentTicketClosed,
    PullResult,
)
from pdmesh.kv.transport.base import KvConnection
from tests.fakes.kv.memory_transport import MemoryTransport
from tests.fakes.kv.pair import (
    FINGERPRINT,
    INCARNATION,
    kv_pair,
    ticket_for,
)
from tests.support.waiting import until

LAYOUT = KvLayout(4, 2, 512, FINGERPRINT)
LANDING = ArenaRange(4096, LAYOUT.total_bytes)


class DyingPeerTransport(MemoryTransport):
    """A transport whose peers die right after the handshake."""

    async def connect(self, address: str, timeout_s: float) -> KvConnection:
        connection = await super().connect(address, timeout_s)
        connection.abort("the peer is gone")
        return connection


@pytest.mark.fault("F2")
async def test_a_peer_that_dies_as_the_connection_opens_fails_the_pull_at_once() -> None:
    """The loss of the peer is reported while the pull still waits for the connection. If the pull
    began afterwards, nothing would ever end it.
    """
    async with kv_pair(DyingPeerTransport) as pair:
        pair.stage(LAYOUT, lease_s=30)
        ticket = ticket_for(pair.address, LAYOUT)
        with pytest.raises(KvTransferFailed) as caught:
            await asyncio.wait_for(pair.receiver.pull(ticket, LANDING, deadline_s=60), 30)
        assert caught.value.reason == PullFailure.PEER_LOST
        assert pair.receiver_events == [AgentLandingFreed(LANDING.offset)]
        assert pair.receiver.num_pulls == 0


class InstantAgent(KvAgent):
    """An agent whose pulls succeed at once. `at_end` is called just before."""

    at_end: Callable[[], None] = staticmethod(lambda: None)

    async def pull(self, ticket: Ticket, landing: ArenaRange, **_: Any) -> PullResult:
        self.at_end()
        return PullResult(landing.length, 0.0)


class Events(list[AgentEvent]):
    """Records the agent's events. Another thread can wait for the first one."""

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
            host_memory(0, 1 << 16),
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
def test_a_pull_cancelled_before_the_agent_starts_it_gives_its_landing_back() -> None:
    """The client leaves while the agent is busy with the checksum of a long prompt."""
    events = Events()
    with agent_thread(events) as (thread, agent):
        is_free = threading.Event()
        agent.post(lambda: assert_(is_free.wait(30)))
        pull = thread.pull(TICKET, LANDING, deadline_s=30)
        assert pull.cancel()
        is_free.set()
        assert events.has_some.wait(30)
        assert events == [AgentLandingFreed(LANDING.offset)]


@pytest.mark.fault("F27")
def test_a_pull_cancelled_as_it_succeeds_gives_its_landing_back() -> None:
    """The bytes already belong to the caller, but the caller no longer wants them."""
    events = Events()
    with agent_thread(events) as (thread, agent):
        has_pull = threading.Event()

        def turn_away() -> None:
            assert_(has_pull.wait(30))
            assert_(pull.cancel())

        agent.at_end = turn_away
        pull = thread.pull(TICKET, LANDING, deadline_s=30)
        has_pull.set()
        assert events.has_some.wait(30)
        assert events == [AgentLandingFreed(LANDING.offset)]


def test_a_pull_that_was_not_cancelled_keeps_its_landing() -> None:
    events = Events()
    with agent_thread(events) as (thread, _):
        assert thread.pull(TICKET, LANDING, deadline_s=30).result(30).num_bytes == LANDING.length
    assert events == []


def assert_(holds: bool) -> None:
    assert holds


async def test_a_callback_that_fails_on_a_range_ends_only_its_own_pull() -> None:
    def on_range(*_: object) -> None:
        raise ValueError("no room")

    async with kv_pair(MemoryTransport) as pair:
        pair.stage(LAYOUT)
        ticket = ticket_for(pair.address, LAYOUT)
        async with asyncio.timeout(30):
            with pytest.raises(ValueError, match="no room"):
                await pair.receiver.pull(ticket, LANDING, deadline_s=30, on_range=on_range)
        assert pair.receiver_events == [AgentLandingFreed(LANDING.offset)]
        assert pair.receiver.num_pulls == 0


BAD_TICKETS = {
    "ticket_id": {"ticket_id": "x" * 129},
    "kv_bytes": {"kv_bytes": LANDING.length + 1},
    "addresses": {"addresses": ()},
}


@pytest.mark.parametrize("field", BAD_TICKETS)
async def test_a_ticket_that_cannot_be_asked_for_gives_the_landing_back(field: str) -> None:
    """The agent owns the landing range until it gives the range back. So it must do so after any
    error.
    """
    async with kv_pair(MemoryTransport) as pair:
        ticket = dataclasses.replace(ticket_for(pair.address, LAYOUT), **BAD_TICKETS[field])  # type: ignore[arg-type]
        with pytest.raises(KvTransferFailed, match=field) as caught:
            await pair.receiver.pull(ticket, LANDING, deadline_s=30)
        assert caught.value.reason == PullFailure.BAD_TICKET
        assert pair.receiver_events == [AgentLandingFreed(LANDING.offset)]
        assert pair.receiver.num_pulls == 0


async def test_a_landing_outside_the_arena_is_given_back_too() -> None:
    async with kv_pair(MemoryTransport) as pair:
        outside = ArenaRange(1 << 40, LAYOUT.total_bytes)
        with pytest.raises(IndexError):
            await pair.receiver.pull(ticket_for(pair.address, LAYOUT), outside, deadline_s=30)
        assert pair.receiver_events == [AgentLandingFreed(outside.offset)]


async def test_a_ticket_with_too_long_a_name_is_neither_kept_nor_staged() -> None:
    """The renewals of this ticket could not be encoded. They would fail the tick that renews all
    other leases.
    """
    async with kv_pair(MemoryTransport) as pair:
        ticket = ticket_for(pair.address, LAYOUT, "x" * 129)
        with pytest.raises(KvTransferFailed, match="ticket_id"):
            await pair.receiver.keep(ticket, 5.0)
        with pytest.raises(ValueError, match="128 bytes"):
            pair.stage(LAYOUT, "x" * 129)
        assert pair.sender.num_tickets == 0


async def test_a_fetch_that_cannot_be_asked_for_frees_its_targets() -> None:
    freed: list[bool] = []
    async with kv_pair(MemoryTransport) as pair:
        with pytest.raises(ValueError, match="0 names"):
            await pair.receiver.fetch(
                pair.address,
                INCARNATION,
                [],
                [],
                deadline_s=30,
                on_freed=lambda: freed.append(True),
            )
    assert freed == [True]


def test_calls_to_an_agent_that_has_ended_fail_and_free_their_resources() -> None:
    """While an engine stops, a caller may still wait for an answer, and then for its range."""
    events, freed = Events(), threading.Event()
    with agent_thread(events) as (thread, _):
        thread.close()
        pull = thread.pull(TICKET, LANDING, deadline_s=30)
        fetch = thread.fetch("nowhere", 1, [], [], deadline_s=30, on_freed=freed.set)
        for future in (pull, fetch):
            error = future.exception(30)
            assert isinstance(error, KvTransferFailed)
            assert error.reason == PullFailure.CLOSING
    assert events == [AgentLandingFreed(LANDING.offset)]
    assert freed.is_set()


SMALL = KvLayout(1, 4, 16 << 10, FINGERPRINT)
# the agent makes and compares its checksums in a thread
LONG = KvLayout(1, 4, 4 << 20, FINGERPRINT)


@pytest.mark.fault("F34")
@pytest.mark.parametrize("layout", [SMALL, LONG], ids=["small", "long"])
async def test_checksums_that_cannot_be_made_fail_the_pull_at_once(
    monkeypatch: pytest.MonkeyPatch, layout: KvLayout
) -> None:
    """For example, no further thread can be started."""

    def broken(*_: object) -> bytes:
        raise MemoryError("no room")

    async with kv_pair(MemoryTransport) as pair:
        monkeypatch.setattr(staged, "checksum", broken)
        whole = ArenaRange(0, layout.total_bytes)
        pair.sender.open("t", 1, whole, layout, 60.0)
        ticket = ticket_for(pair.address, layout)
        pull = asyncio.create_task(pair.receiver.pull(ticket, whole, deadline_s=60))
        await until(lambda: pair.sender.stats().num_sends)
        pair.sender.ready("t", layout.num_layers)
        with pytest.raises(KvTransferFailed, match="TICKET_CLOSED"):
            await asyncio.wait_for(pull, 30)
        await until(lambda: pair.sender_events == [AgentTicketClosed("t", "failed")])


@pytest.mark.fault("F34")
@pytest.mark.parametrize("layout", [SMALL, LONG], ids=["small", "long"])
async def test_checksums_that_cannot_be_compared_fail_the_pull_at_once(
    monkeypatch: pytest.MonkeyPatch, layout: KvLayout
) -> None:
    def broken(*_: object) -> bool:
        raise MemoryError("no room")

    async with kv_pair(MemoryTransport) as pair:
        monkeypatch.setattr(agent_receiver, "are_intact", broken)
        whole = ArenaRange(0, layout.total_bytes)
        pair.sender.stage("t", 1, whole, layout, 60.0, chunk_bytes=layout.total_bytes)
        pull = pair.receiver.pull(ticket_for(pair.address, layout), whole, deadline_s=60)
        with pytest.raises(KvTransferFailed) as caught:
            await asyncio.wait_for(pull, 30)
        assert caught.value.reason == PullFailure.UNCHECKED
        await until(lambda: pair.receiver_events == [AgentLandingFreed(0)])
        assert not pair.receiver.stats().num_corrupt, "the failure says nothing about the source"


async def test_a_bug_in_a_tick_does_not_stop_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only ticks end leases, enforce deadlines and abort connections of frozen peers."""
    async with kv_pair(MemoryTransport) as pair:
        pair.stage(LAYOUT, lease_s=0.2)
        ticks: list[bool] = []

        def broken(real: Callable[[], None] = pair.sender._sender.tick) -> None:
            ticks.append(True)
            if len(ticks) == 1:
                raise AssertionError("a bug")
            real()

        monkeypatch.setattr(pair.sender._sender, "tick", broken)
        await until(lambda: pair.sender_events == [AgentTicketClosed("t", "expired")])


async def test_a_message_that_hits_a_bug_ends_only_its_own_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with kv_pair(MemoryTransport) as pair:
        pair.stage(LAYOUT)
        ticket = ticket_for(pair.address, LAYOUT)

        def broken(*_: object) -> None:
            raise AssertionError("a bug")

        with monkeypatch.context() as patched:
            patched.setattr(pair.sender._sender, "on_pull", broken)
            with pytest.raises(KvTransferFailed) as caught:
                await pair.receiver.pull(ticket, LANDING, deadline_s=30)
            assert caught.value.reason == PullFailure.PEER_LOST
        again = await pair.receiver.pull(ticket, LANDING, deadline_s=30)
        assert again.num_bytes == LAYOUT.total_bytes


@pytest.mark.req("S49")
async def test_a_connection_in_use_is_not_dropped_for_another() -> None:
    """A connection is also in use while a lease is renewed over it, or while a pull waits for
    it.
    """
    async with kv_pair(MemoryTransport) as pair:
        pair.stage(LAYOUT)
        receiver = pair.receiver
        receiver._pool._max_peers = 1
        await receiver.keep(ticket_for(pair.address, LAYOUT), 30.0)
        with pytest.raises(KvTransferFailed) as caught:
            await receiver.connect(receiver.address)
        assert caught.value.reason == PullFailure.BUSY
        receiver.stop_renewing("t")
        await receiver.connect(receiver.address)
        first = asyncio.create_task(receiver.connect(pair.address))
        while pair.address not in receiver._pool._open:
            await asyncio.sleep(0)
        if not first.done():
            with pytest.raises(KvTransferFailed, match="in use"):
                await receiver.connect(receiver.address)
        await first


@pytest.mark.req("S48")
def test_layers_that_complete_no_part_do_not_wake_the_agents_thread() -> None:
    layout = KvLayout(32, 1, 128 << 10, FINGERPRINT)
    whole = ArenaRange(0, layout.total_bytes)
    told: list[int] = []

    class Told(KvAgent):
        def ready(self, ticket_id: str, num_layers: int) -> None:
            told.append(num_layers)
            super().ready(ticket_id, num_layers)

    identity = AgentIdentity("prefill-0", INCARNATION, FINGERPRINT)
    thread = AgentThread(
        lambda: Told(
            MemoryTransport(),
            identity,
            host_memory(whole.length, 0),
            on_event=lambda _: None,
        )
    )
    thread.start()
    try:
        thread.open("t", 1, whole, layout, 60.0).result(30)
        for layer in range(layout.num_layers):
            thread.ready("t", layer + 1)
        # This call is queued after all calls of `ready`. When it ends, the agent has handled all of
        # them.
        thread.stage("u", 1, ArenaRange(0, 0), KvLayout(0, 0, 8), 5.0).result(30)
        assert told == [16, 24, 28, 29, 30, 31, 32, 0]
    finally:
        thread.close()


class SlowToConnect(MemoryTransport):
    """A transport whose connections open only after `may_connect` is set."""

    may_connect: asyncio.Event

    async def connect(self, address: str, timeout_s: float) -> KvConnection:
        self.is_connecting.set()
        await self.may_connect.wait()
        return await super().connect(address, timeout_s)

    def __init__(self) -> None:
        super().__init__()
        self.may_connect, self.is_connecting = asyncio.Event(), asyncio.Event()


@pytest.mark.req("S41")
@pytest.mark.parametrize("opens", [False, True])
async def test_the_end_of_prefill_bounds_the_silence_of_an_early_pull_that_still_connects(
    opens: bool,
) -> None:
    """Once the prefill is done, silence is a fault at any stage of a pull. Here the peer is cut off
    while the connection opens.
    """
    async with kv_pair(SlowToConnect) as pair:
        transport = pair.receiver_transport
        assert isinstance(transport, SlowToConnect)
        ticket = ticket_for(pair.address, LAYOUT)
        pull = asyncio.create_task(pair.receiver.pull(ticket, LANDING, deadline_s=600))
        await transport.is_connecting.wait()
        pair.receiver.expect("t", 0.05)
        if opens:
            pair.sender.open("t", 1, ArenaRange(4096, LAYOUT.total_bytes), LAYOUT, 30.0)
            transport.may_connect.set()  # the connection opens, but brings nothing
        with pytest.raises(KvTransferFailed) as caught:
            await asyncio.wait_for(pull, 60)
        assert caught.value.reason == PullFailure.TIMEOUT
        transport.may_connect.set()
        pair.sender.release("t")
        await until(lambda: pair.receiver_events == [AgentLandingFreed(LANDING.offset)])


async def test_the_end_of_prefill_bounds_the_silence_of_a_pull_that_begins_after_it() -> None:
    """The pull and the message that the prefill is done arrive together. The task of the pull
    starts after the message is handled.
    """
    async with kv_pair(MemoryTransport) as pair:
        pair.sender.open("t", 1, ArenaRange(4096, LAYOUT.total_bytes), LAYOUT, 30.0)
        ticket = ticket_for(pair.address, LAYOUT)
        pull = asyncio.create_task(pair.receiver.pull(ticket, LANDING, deadline_s=600))
        pair.receiver.expect("t", 0.05)
        with pytest.raises(KvTransferFailed) as caught:
            await asyncio.wait_for(pull, 60)
        assert caught.value.reason == PullFailure.TIMEOUT
        pair.sender.release("t")
        await until(lambda: pair.receiver_events == [AgentLandingFreed(LANDING.offset)])
