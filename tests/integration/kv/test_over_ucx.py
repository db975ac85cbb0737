"""Tests KV transfer between two processes over UCX, even when one of them dies or freezes."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from pdmesh import failpoints
from pdmesh.core.instance.arena import ArenaRange
from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.core.kv.transfer.ticket import Ticket
from pdmesh.errors import KvTransferFailed
from pdmesh.kv.agent.agent import KvAgent
from pdmesh.kv.agent.arena_memory import host_memory
from pdmesh.kv.agent.thread import AgentThread
from pdmesh.kv.agent.types import AgentEvent, AgentIdentity, AgentLandingFreed
from pdmesh.kv.transport.base import KvConnection
from pdmesh.kv.transport.ucx import UcxTransport
from pdmesh.kv.transport.ucx_handshake import parse_address
from tests.fakes.kv.pair import (
    FINGERPRINT,
    INCARNATION,
    pattern,
    ticket_for,
)
from tests.fakes.kv.sender_process import NUM_LAYERS
from tests.support.waiting import PATIENCE_S, until

ROOT = Path(__file__).parents[3]
SMALL = KvLayout(NUM_LAYERS, 2, 512, FINGERPRINT)
LARGE = KvLayout(
    NUM_LAYERS,
    64,
    256 << 10,
    FINGERPRINT,
    # 64 MiB take long enough to kill a process during the transfer.
)


@dataclass
class Sender:
    process: Process
    address: str
    layout: KvLayout
    num_staged: int = 0
    closed: list[str] = field(default_factory=list)

    async def stage(self, count: int = 1) -> list[Ticket]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"stage {count}\n".encode())
        await self._read_until("staged")
        names = [f"t{self.num_staged + i}" for i in range(count)]
        self.num_staged += count
        return [ticket_for(self.address, self.layout, name) for name in names]

    async def wait_closed(self, line: str) -> None:
        while line not in self.closed:
            await self._read_until("closed")

    async def _read_until(self, word: str) -> None:
        assert self.process.stdout is not None
        while True:
            line = (await asyncio.wait_for(self.process.stdout.readline(), 60)).decode().strip()
            assert line, "the sender is gone"
            if line.startswith("closed"):
                self.closed.append(line.removeprefix("closed "))
            if line.startswith(word):
                return


@asynccontextmanager
async def sender(layout: KvLayout, lease_s: float = 10.0) -> AsyncIterator[Sender]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.fakes.kv.sender_process",
        str(layout.num_blocks), str(layout.block_bytes), str(lease_s),
        stdin=PIPE, stdout=PIPE, cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/libs"},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        address = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip()
        assert address, "the sender did not start"
        yield Sender(process, address, layout)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()


@asynccontextmanager
async def receiver(events: list[AgentEvent]) -> AsyncIterator[KvAgent]:
    agent = KvAgent(
        UcxTransport(),
        AgentIdentity("decode-0", INCARNATION + 1, FINGERPRINT),
        host_memory(0, LARGE.total_bytes),
        on_event=events.append,
    )
    await agent.start()
    try:
        yield agent
    finally:
        agent.check_invariants()
        await agent.close()
        assert agent.num_pulls == 0


def landing(layout: KvLayout) -> ArenaRange:
    return ArenaRange(0, layout.total_bytes)


@pytest.mark.req("S47", "S49")
async def test_kv_moves_between_processes_and_its_ticket_is_taken() -> None:
    events: list[AgentEvent] = []
    async with sender(LARGE) as prefill, receiver(events) as decode:
        (ticket,) = await prefill.stage()
        await decode.pull(ticket, landing(LARGE), deadline_s=60)
        assert (decode.landing(landing(LARGE)) == pattern(LARGE.total_bytes)).all()
        await prefill.wait_closed("t0 taken")
        assert events == []


@pytest.mark.fault("F2")
async def test_a_sender_killed_during_a_transfer_fails_the_pull_at_once() -> None:
    events: list[AgentEvent] = []
    async with sender(LARGE) as prefill, receiver(events) as decode:
        (ticket,) = await prefill.stage()
        await decode.connect(prefill.address)
        view = decode.landing(landing(LARGE))
        pull = asyncio.create_task(decode.pull(ticket, landing(LARGE), deadline_s=600))
        await until(lambda: bool(view[: 1 << 20].any()))  # the first bytes have arrived
        prefill.process.kill()
        with pytest.raises(KvTransferFailed) as caught:
            await asyncio.wait_for(pull, PATIENCE_S)  # far below the deadline of the pull
        assert caught.value.reason == "KV_PEER_LOST"
        await until(lambda: events == [AgentLandingFreed(0)])
        before = view.copy()
        await asyncio.sleep(0.05)
        assert (view == before).all(), "a late write after the landing was freed"


@pytest.mark.fault("F4")
async def test_a_frozen_sender_fails_the_pull_at_its_deadline_and_never_writes_again() -> None:
    events: list[AgentEvent] = []
    async with sender(LARGE) as prefill, receiver(events) as decode:
        (ticket,) = await prefill.stage()
        await decode.connect(prefill.address)
        view = decode.landing(landing(LARGE))
        started = time.monotonic()
        pull = asyncio.create_task(decode.pull(ticket, landing(LARGE), deadline_s=3.0))
        await until(lambda: bool(view[: 1 << 20].any()))
        prefill.process.send_signal(signal.SIGSTOP)
        with pytest.raises(KvTransferFailed) as caught:
            await pull
        assert caught.value.reason == "KV_TRANSFER_TIMEOUT"
        assert time.monotonic() - started >= 3.0
        await until(lambda: events == [AgentLandingFreed(0)])
        view[:] = 0
        prefill.process.send_signal(signal.SIGCONT)
        await asyncio.sleep(0.2)
        assert not view.any(), "a frozen sender's bytes landed in a range that was freed"


@pytest.mark.fault("F25")
async def test_a_connection_that_ends_during_receives_fails_its_pulls_at_once() -> None:
    """The sender cuts its connection while the receiver has posted receives.

    In this case, ucxx once only marked the receives for cancellation. So the connection never ended
    at the receiver. The receiver kept the pulls, their slots, and the memory ranges in which the KV
    should arrive.
    """
    layout, freed = KvLayout(8, 16, 8192, FINGERPRINT), list[AgentEvent]()
    size = layout.total_bytes
    sender = KvAgent(
        UcxTransport(),
        AgentIdentity("prefill-0", INCARNATION, FINGERPRINT),
        host_memory(size, 0),
        on_event=lambda event: None,
    )
    receiver = KvAgent(
        UcxTransport(),
        AgentIdentity("decode-0", INCARNATION + 1, FINGERPRINT),
        host_memory(0, size),
        on_event=freed.append,
    )
    address = await sender.start()
    await receiver.start()
    try:
        for attempt in range(10):  # most attempts, but not all, met the fault
            failpoints.arm("prefill.sending=cut@3")
            name, r = f"t{attempt}", ArenaRange(0, size)
            sender.stage(name, 1, r, layout, 30.0, chunk_bytes=size // 4)
            with pytest.raises(KvTransferFailed) as caught:
                await receiver.pull(ticket_for(address, layout, name), r, deadline_s=60.0)
            assert caught.value.reason == "KV_PEER_LOST"
            await until(lambda attempt=attempt: len(freed) == attempt + 1)
            sender.release(name)
            await until(lambda: sender.num_tickets == 0)
    finally:
        failpoints.arm("")
        await receiver.close()
        await sender.close()


@pytest.mark.fault("F4")
async def test_a_sender_that_was_frozen_serves_the_next_pull() -> None:
    events: list[AgentEvent] = []
    async with sender(SMALL) as prefill, receiver(events) as decode:
        (ticket,) = await prefill.stage()
        await decode.connect(prefill.address)
        prefill.process.send_signal(signal.SIGSTOP)
        with pytest.raises(KvTransferFailed):
            await decode.pull(ticket, landing(SMALL), deadline_s=0.3)
        prefill.process.send_signal(signal.SIGCONT)
        await decode.pull(ticket, landing(SMALL), deadline_s=30)
        assert (decode.landing(landing(SMALL)) == pattern(SMALL.total_bytes)).all()


@pytest.mark.fault("F4")
async def test_over_shared_memory_a_frozen_sender_blocks_one_pull_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The receiver itself reads the sender's memory. So a sender that freezes before it sends META,
    its first message, holds up only one pull, which has a deadline.
    """
    monkeypatch.setenv("UCX_TLS", "tcp,sm")
    events: list[AgentEvent] = []
    async with sender(LARGE) as prefill, receiver(events) as decode:
        first, second, third = await prefill.stage(3)
        await decode.pull(first, landing(LARGE), deadline_s=60)
        assert (decode.landing(landing(LARGE)) == pattern(LARGE.total_bytes)).all()
        prefill.process.send_signal(signal.SIGSTOP)
        with pytest.raises(KvTransferFailed):
            await decode.pull(second, landing(LARGE), deadline_s=0.3)
        await until(lambda: events == [AgentLandingFreed(0)])
        view = decode.landing(landing(LARGE))
        view[:] = 0
        prefill.process.send_signal(signal.SIGCONT)
        await decode.pull(third, landing(LARGE), deadline_s=60)
        assert (view == pattern(LARGE.total_bytes)).all()


@pytest.mark.fault("F5")
async def test_a_killed_sender_is_replaced_and_its_tickets_die_with_it() -> None:
    events: list[AgentEvent] = []
    async with receiver(events) as decode:
        async with sender(SMALL) as prefill:
            (ticket,) = await prefill.stage()
            await decode.connect(prefill.address)
        with pytest.raises(KvTransferFailed) as caught:
            await decode.pull(ticket, landing(SMALL), deadline_s=2)
        assert caught.value.reason in {"KV_CONNECT_FAILED", "KV_PEER_LOST", "KV_TRANSFER_TIMEOUT"}
        async with sender(SMALL) as prefill:
            (ticket,) = await prefill.stage()
            await decode.pull(ticket, landing(SMALL), deadline_s=30)


@pytest.mark.fault("F6")
async def test_a_ticket_whose_receiver_dies_can_be_pulled_by_another() -> None:
    async with sender(LARGE) as prefill:
        (ticket,) = await prefill.stage()
        events: list[AgentEvent] = []
        async with receiver(events) as first:
            pull = asyncio.create_task(first.pull(ticket, landing(LARGE), deadline_s=30))
            view = first.landing(landing(LARGE))
            await until(lambda: bool(view[: 1 << 20].any()))
        with pytest.raises(KvTransferFailed):
            await pull
        async with receiver([]) as second:
            await second.pull(ticket, landing(LARGE), deadline_s=60)
        await prefill.wait_closed("t0 taken")


@pytest.mark.fault("F6", "F35")
async def test_tickets_that_are_never_pulled_are_freed_at_the_end_of_their_lease() -> None:
    async with sender(SMALL, lease_s=0.2) as prefill:
        await prefill.stage(3)
        for name in ("t0", "t1", "t2"):
            await prefill.wait_closed(f"{name} expired")


async def test_two_hundred_pulls_leave_no_descriptor_and_no_connection_behind() -> None:
    events: list[AgentEvent] = []
    async with sender(SMALL) as prefill, receiver(events) as decode:
        fds = Path("/proc/self/fd")
        sender_fds = Path(f"/proc/{prefill.process.pid}/fd")
        (ticket,) = await prefill.stage()
        await decode.pull(ticket, landing(SMALL), deadline_s=30)
        before = len(list(fds.iterdir())), len(list(sender_fds.iterdir()))
        for ticket in await prefill.stage(200):
            await decode.pull(ticket, landing(SMALL), deadline_s=30)
        await prefill.wait_closed("t200 taken")
        assert (len(list(fds.iterdir())), len(list(sender_fds.iterdir()))) == before


async def test_agents_that_come_and_go_leave_no_descriptor_behind() -> None:
    fds = Path("/proc/self/fd")

    async def come_and_go() -> int:
        async with receiver([]) as one, receiver([]) as other:
            await one.connect(other.address)
        return len(list(fds.iterdir()))

    before = await come_and_go()
    for _ in range(5):
        after = await come_and_go()
    assert after == before


class _BusyTransport(UcxTransport):
    """A transport that calls a test's hook before it reads a hello. In the hook, the test lets the
    peer give up the connection.
    """

    on_hello: Callable[[], object] = staticmethod(lambda: None)

    def _on_hello(self, data: bytes) -> None:
        self.on_hello()
        super()._on_hello(data)


@pytest.mark.fault("F4", "F39")
@pytest.mark.parametrize("is_closed", [False, True], ids=["cancelled", "closed"])
async def test_a_connection_given_up_before_its_welcome_ends_at_both_peers(
    is_closed: bool,
) -> None:
    """A peer that gives up must tell the other side. Otherwise the other side would keep the
    connection and its descriptors until one of the processes ends.
    """
    here, there = UcxTransport(), _BusyTransport()
    await here.start(_Deaf())
    address = await there.start(_Deaf())
    closing: list[asyncio.Task[None]] = []
    try:
        await here.connect(address, 30.0)
        (await here.connect(address, 30.0)).abort("as others end")
        await until(lambda: there.num_connections == 1)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(10):
            connecting = asyncio.create_task(here.connect(address, 30.0))
            there.on_hello = connecting.cancel
            await asyncio.wait([connecting])
            assert connecting.cancelled()
        if is_closed:
            there.on_hello = lambda: closing.append(asyncio.create_task(here.close()))
            with pytest.raises(KvTransferFailed):
                await here.connect(address, 30.0)
        await until(lambda: there.num_connections == (0 if is_closed else 1))
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    finally:
        await asyncio.gather(*closing)
        await here.close()
        await there.close()


def listening() -> dict[int, str]:
    """The ports on which this process listens, with their addresses."""
    own = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(str(fd.readlink()))
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            address, _, port = words[1].partition(":")
            if words[3] == _LISTENS and f"socket:[{words[9]}]" in own:
                raw = b"".join(
                    int(address[k : k + 8], 16).to_bytes(4, sys.byteorder)
                    for k in range(0, len(address), 8)
                )
                found[int(port, 16)] = str(ipaddress.ip_address(raw))
    return found


_LISTENS = "0A"  # the state of a socket in /proc/net/tcp


@pytest.mark.fault("F39")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.5", "::1"])
async def test_an_agent_on_a_loopback_address_listens_on_loopback_only(host: str) -> None:
    before = listening()
    transport = UcxTransport(host)
    try:
        await transport.start(_Deaf())
        new = {port: at for port, at in listening().items() if port not in before}
        assert all(ipaddress.ip_address(at).is_loopback for at in (before | new).values())
    finally:
        await transport.close()


@pytest.mark.fault("F39")
async def test_garbage_and_half_open_connections_leave_nothing_behind() -> None:
    """The garbage goes to the port of the UCX worker, which is the only open one.

    The agent has no UCX listener. A listener would need UCX's connection manager, which spun for
    minutes and leaked descriptors.
    """
    async with receiver([]) as agent:
        await agent.connect(agent.address)
        await asyncio.sleep(0.2)
        before = len(os.listdir("/proc/self/fd"))
        there = parse_address(agent.address).worker
        # Other tests have left workers unused. They read from their ports only when they are used
        # again, so the garbage must go to the port of this agent.
        ports = [port for port in listening() if port.to_bytes(2, "big") in there]
        assert ports
        for port in ports:
            for size in (1, 8, 100, 2_500, 100_000):
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.setblocking(False)
                    with contextlib.suppress(OSError):
                        stranger.send(os.urandom(size))
                    await asyncio.sleep(0.05)
            half_open = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
            other = UcxTransport()
            await other.start(_Deaf())
            (await other.connect(agent.address, 30.0)).abort("served meanwhile")
            await other.close()
            used, began = time.process_time(), time.monotonic()
            await asyncio.sleep(1.0)
            share = (time.process_time() - used) / (time.monotonic() - began)
            assert share < 0.5, "the garbage keeps a processor busy"
            for stranger in half_open:
                stranger.close()
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before + _OTHERS)


_OTHERS = 12  # the second worker keeps these descriptors


@pytest.mark.fault("F39")
async def test_a_process_without_the_handshake_key_cannot_connect() -> None:
    """The stranger uses UCX and knows the worker's address, which anybody can read on the
    network.
    """
    async with receiver([]) as agent:
        there = parse_address(agent.address)
        stranger = UcxTransport()
        await stranger.start(_Deaf())
        with pytest.raises(KvTransferFailed) as caught:
            await stranger.connect(str(replace(there, key=bytes(16))), 0.5)
        assert caught.value.reason == "KV_CONNECT_FAILED"
        assert agent.stats().num_peers == 0
        (await stranger.connect(agent.address, 30.0)).abort("known")
        await stranger.close()


class _Deaf:
    def on_connected(self, connection: KvConnection) -> None: ...
    def on_message(self, connection: KvConnection, message: memoryview) -> None: ...
    def on_closed(self, connection: KvConnection, reason: str) -> None: ...


async def test_an_agent_on_its_own_thread_serves_a_busy_loop() -> None:
    """The KV must move although the event loop of the host is blocked."""

    def make(incarnation: int) -> KvAgent:
        return KvAgent(
            UcxTransport(),
            AgentIdentity("both", incarnation, FINGERPRINT),
            host_memory(1 << 20, 1 << 20),
            on_event=lambda _: None,
        )

    prefill = AgentThread(lambda: make(INCARNATION))
    decode = AgentThread(lambda: make(INCARNATION + 1))
    try:
        address = prefill.start()
        decode.start()
        prefill.staging(landing(SMALL))[:] = pattern(SMALL.total_bytes)
        for i in range(50):
            prefill.stage(f"t{i}", 1, landing(SMALL), SMALL, 60.0)
            ticket = ticket_for(address, SMALL, f"t{i}")
            decode.pull(ticket, landing(SMALL), deadline_s=30).result(60)
        assert (decode.landing(landing(SMALL)) == pattern(SMALL.total_bytes)).all()
    finally:
        decode.close(60.0)
        prefill.close(60.0)
        assert not any(agent._thread.is_alive() for agent in (decode, prefill))
    with pytest.raises(KvTransferFailed):
        decode.release("t0")


def test_the_agent_runs_on_uvloop_and_does_not_block_it() -> None:
    """uvloop's clock stands still within a callback, so the agent must not measure a time budget
    with it.
    """
    uvloop = pytest.importorskip("uvloop")

    async def main() -> int:
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with sender(LARGE) as prefill, receiver([]) as decode:
            (ticket,) = await prefill.stage()
            await decode.connect(prefill.address)
            turning = asyncio.create_task(turn())
            await decode.pull(ticket, landing(LARGE), deadline_s=60)
            turning.cancel()
            assert (decode.landing(landing(LARGE)) == pattern(LARGE.total_bytes)).all()
        return turns

    assert uvloop.run(main()) > 4


def cpu_of(what: Callable[[], object]) -> float:
    """The CPU seconds that all threads of this process spend while `what` runs."""
    cpu = time.process_time()
    what()
    return time.process_time() - cpu


def _spin_for_a_second() -> None:
    until_s = time.monotonic() + 1.0
    while time.monotonic() < until_s:
        pass


def test_idle_agents_cost_nothing() -> None:
    """Compares the agents' CPU time with that of a thread that spins for the same time."""

    def make() -> KvAgent:
        identity = AgentIdentity("idle", INCARNATION, FINGERPRINT)
        return KvAgent(UcxTransport(), identity, host_memory(0, 0), on_event=lambda _: None)

    agents = [AgentThread(make) for _ in range(2)]
    try:
        first, second = (agent.start() for agent in agents)
        agents[0].keep(ticket_for(second, SMALL), 0.0).result(60)
        agents[1].keep(ticket_for(first, SMALL), 0.0).result(60)
        idle_s = cpu_of(lambda: time.sleep(1.0))
        assert idle_s < cpu_of(_spin_for_a_second) / 5, (
            "the idle agents use as much CPU as a thread that polls"
        )
    finally:
        for agent in agents:
            agent.close()
