"""Moves KV between two processes that die, freeze, or have a bad network between them.

The receiver pulls the KV of a ticket from the sender, in parts. A pull must end for the right
reason: its deadline, its stall bound, or the loss of its peer (F2-F6, F23-F25, F34). tests/chaos
measures how long that takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.kv.transport.ucx import UcxTransport
from tests.fakes.kv.bad_link import (
    IN_A_NAMESPACE,
    RECEIVER_IP,
    SENDER_IP,
    BadLink,
    reset,
    why_not,
)
from tests.fakes.kv.pair import FINGERPRINT
from tests.fakes.kv.sender_process import NUM_LAYERS

ROOT = Path(__file__).parents[3]
PARTS = 16
# 64 MiB take long enough for a process to die during the transfer.
LARGE = KvLayout(NUM_LAYERS, 64, 256 << 10, FINGERPRINT)
MEDIUM = KvLayout(NUM_LAYERS, 16, 64 << 10, FINGERPRINT)  # 4 MiB
LATE_S = 600.0  # no pull reaches this deadline, so something else must end it


@dataclass
class Agent:
    """A sender or receiver process, and the lines that it has printed."""

    process: Process
    said: list[str] = field(default_factory=list)
    _listening: asyncio.Task[None] | None = None

    async def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        await self.process.stdin.drain()

    async def hear(self, start: str, within_s: float = 60.0) -> list[str]:
        """Wait for a line that begins with `start` and return its words. Fails if no such line
        comes in time.
        """
        ends = time.monotonic() + within_s
        while True:
            for line in self.said:
                if line.startswith(start):
                    return line.split()
            assert time.monotonic() < ends, (
                f"no {start!r} within {within_s} s, but {self.said[-5:]}"
            )
            await asyncio.sleep(0.002)

    def listen(self) -> None:
        async def listen() -> None:
            assert self.process.stdout is not None
            while line := await self.process.stdout.readline():
                self.said.append(line.decode().strip())

        self._listening = asyncio.create_task(listen())

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    async def end(self) -> None:
        # The process may be dead although asyncio does not know it yet.
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
            self.process.kill()
        await self.process.wait()
        if self._listening is not None:
            await self._listening


@asynccontextmanager
async def agent(
    role: str, *arguments: object, link: BadLink | None = None, beside: Agent | None = None
) -> AsyncIterator[Agent]:
    """Start a sender or receiver process.

    With a link, the process gets a network namespace of its own, and starts when its end of the
    link is there. With `beside`, the process joins the namespace of that other process.
    """
    own_ip = SENDER_IP if role == "sender" else RECEIVER_IP
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/libs"}
    command = [sys.executable, "-m", f"tests.fakes.kv.{role}_process", *map(str, arguments)]
    if link is not None:
        environment |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "kv0"}
        command = [*IN_A_NAMESPACE, "sh", "-c", 'read go; exec "$@"', "sh", *command]
    if beside is not None:
        environment |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "kv0"}
        command = ["nsenter", "-t", str(beside.process.pid), "-n", "-m", *command]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, cwd=ROOT, env=environment
    )
    it = Agent(process)
    it.listen()
    try:
        if link is not None:
            own = Path("/proc/self/ns/net").readlink()
            while Path(f"/proc/{process.pid}/ns/net").readlink() == own:
                await asyncio.sleep(0.002)
            await asyncio.to_thread(link.attach, process.pid, own_ip)
            await it.tell("go")
        yield it
    finally:
        await it.end()


@asynccontextmanager
async def pair(
    layout: KvLayout, lease_s: float, link: BadLink | None = None, chunk_bytes: int = 0
) -> AsyncIterator[tuple[Agent, Agent, str]]:
    """A sender that has staged the KV of ticket t0, a receiver, and the sender's address."""
    sizes = (layout.num_blocks, layout.block_bytes, lease_s)
    hosts = (SENDER_IP, RECEIVER_IP) if link else ("127.0.0.1", "127.0.0.1")
    chunk = chunk_bytes or layout.total_bytes // PARTS
    async with (
        agent("sender", *sizes, hosts[0], chunk, link=link) as sender,
        agent("receiver", *sizes, hosts[1], link=link) as receiver,
    ):
        await receiver.hear("ready")
        address = (await sender.hear("ucx:"))[0]
        await sender.tell("stage 1")
        await sender.hear("staged")
        yield sender, receiver, address


@asynccontextmanager
async def bad_link() -> AsyncIterator[BadLink]:
    link = BadLink()
    try:
        yield link
    finally:
        await asyncio.to_thread(link.close)


def part(number: int, layout: KvLayout = LARGE) -> str:
    """The line that the receiver prints once it has verified `number` parts."""
    return f"part {layout.total_bytes // PARTS * number}"


# -- processes ------------------------------------------------------------------------------------


@pytest.mark.fault("F2")
@pytest.mark.parametrize("number", [1, 8, 15])
async def test_a_sender_killed_after_any_part_fails_the_pull_at_once(number: int) -> None:
    async with pair(LARGE, 60.0) as (sender, receiver, address):
        await receiver.tell(f"pull {address} t0 {LATE_S}")
        await receiver.hear(part(number))
        sender.signal(signal.SIGKILL)
        _, _, outcome, _ = await receiver.hear("pulled")
        if outcome == "ok":
            assert number == 15, "every byte had left when the signal came"
            return
        assert outcome == "KV_PEER_LOST"
        await receiver.hear("freed")


@pytest.mark.fault("F6")
async def test_a_receiver_killed_in_mid_pull_frees_the_sender_and_leaves_the_ticket() -> None:
    async with pair(LARGE, 60.0) as (sender, receiver, address):
        await receiver.tell(f"pull {address} t0 {LATE_S}")
        await receiver.hear(part(2))
        receiver.signal(signal.SIGKILL)
        async with agent("receiver", LARGE.num_blocks, LARGE.block_bytes, 60.0) as other:
            await other.hear("ready")
            await other.tell(f"pull {address} t0 {LATE_S}")
            assert (await other.hear("pulled"))[2] == "ok", "another decode takes the same bytes"
        await sender.hear("closed t0 taken")


@pytest.mark.fault("F6", "F35")
async def test_a_receiver_frozen_in_mid_pull_loses_its_lease_and_reads_no_more() -> None:
    async with pair(LARGE, 4.0) as (sender, receiver, address):
        await receiver.tell(f"pull {address} t0 {LATE_S}")
        await receiver.hear(part(2))
        receiver.signal(signal.SIGSTOP)
        await sender.hear("closed t0 expired")
        receiver.signal(signal.SIGCONT)
        _, _, outcome, _ = await receiver.hear("pulled")
        # When the receiver continues, it may find the sender's last message or the end of its
        # connection first.
        assert outcome in {"KV_REFUSED_LEASE_ENDED", "KV_PEER_LOST"}
        await receiver.hear("freed")


@pytest.mark.fault("F4")
async def test_a_sender_frozen_in_mid_pull_fails_it_at_its_deadline_and_frees_soon_after() -> None:
    async with pair(LARGE, LATE_S) as (sender, receiver, address):
        await receiver.tell(f"pull {address} t0 4.0")
        await receiver.hear(part(1))
        sender.signal(signal.SIGSTOP)
        _, _, outcome, seconds = await receiver.hear("pulled")
        assert outcome == "KV_TRANSFER_TIMEOUT"
        assert float(seconds) >= 4.0
        await receiver.hear("freed")


class _Silent:
    """A handler that only counts closed connections."""

    num_closed = 0

    def on_connected(self, _: object) -> None: ...

    def on_message(self, _: object, __: object) -> None: ...

    def on_closed(self, _: object, __: str) -> None:
        self.num_closed += 1


@pytest.mark.fault("F4")
async def test_dropping_connections_to_a_frozen_peer_does_not_hold_the_loop() -> None:
    """The connections have messages and payloads on their way that a frozen peer never takes.

    Each round drops connections to a healthy peer and connections to a frozen one. The least
    disturbed round of each kind counts. A close that waited for its peer would take a second in
    each round.
    """
    held_s: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(5):
        for is_frozen in (False, True):
            held_s[is_frozen].append(await _held_by_drops(is_frozen))
        if min(held_s[True]) <= 10 * min(held_s[False]):
            return
    pytest.fail(
        f"the loop was held for {held_s[True]} s, and {held_s[False]} with a peer that is well"
    )


async def _held_by_drops(is_frozen: bool) -> float:
    """The longest turn of the event loop, in seconds, while it drops six connections."""
    async with agent("sender", 4, 4096, 5.0) as sender:
        address = (await sender.hear("ucx:"))[0]
        transport, handler = UcxTransport(), _Silent()
        await transport.start(handler)
        connections = [await transport.connect(address, 60.0) for _ in range(6)]
        if is_frozen:
            sender.signal(signal.SIGSTOP)
        payload = np.zeros(16 << 20, np.uint8)
        for connection in connections:
            connection.send_payload(1, payload, lambda: None)
            connection.recv_payload(2, np.zeros(1 << 20, np.uint8), lambda: None)
            connection.send([bytes(60_000)])
        await asyncio.sleep(0)
        longest, turned = 0.0, time.monotonic()
        for connection in connections:
            connection.abort("dropped")
        while handler.num_closed < len(connections):
            await asyncio.sleep(0.001)
            longest, turned = max(longest, time.monotonic() - turned), time.monotonic()
        await transport.close()
        return longest


# -- the link -------------------------------------------------------------------------------------

needs_link = pytest.mark.skipif(bool(why_not()), reason=f"a bad link {why_not()}")


@needs_link
@pytest.mark.fault("F23", "F25")
@pytest.mark.parametrize("at", [100, 200, 2_000, 300_000, 1_500_000, 3_500_000])
async def test_a_link_that_falls_silent_at_any_byte_ends_in_time_on_both_sides(at: int) -> None:
    """The parameter is the byte after which the link is silent. It may be anywhere from the
    handshake, in which UCX connects both ways, to the last part.

    No error reaches either side. Both see only silence.
    """
    lease_s = deadline_s = 5.0
    async with bad_link() as link, pair(MEDIUM, lease_s, link) as (sender, receiver, address):
        link.cut_at = link.num_bytes + at
        await receiver.tell(f"pull {address} t0 {deadline_s}")
        _, _, outcome, seconds = await receiver.hear("pulled")
        assert link.is_cut
        assert outcome in {"KV_TRANSFER_TIMEOUT", "KV_CONNECT_FAILED"}
        assert float(seconds) >= deadline_s
        await receiver.hear("freed")
        # Each sent part has renewed the ticket's lease. When the lease ends, nobody may read the
        # staged KV any more.
        await sender.hear("closed t0 expired")


@needs_link
@pytest.mark.fault("F23", "F25")
@pytest.mark.parametrize("at", [200, 300_000, 3_500_000])
async def test_a_silent_link_is_detected_by_the_stall_bound_long_before_the_deadline(
    at: int,
) -> None:
    """The request may take ten minutes, but its pull ends after 4 s of silence."""
    async with bad_link() as link, pair(MEDIUM, 60.0, link) as (_, receiver, address):
        link.cut_at = link.num_bytes + at
        await receiver.tell(f"pull {address} t0 {LATE_S} 4.0")
        _, _, outcome, seconds = await receiver.hear("pulled")
        assert outcome in {"KV_TRANSFER_TIMEOUT", "KV_CONNECT_FAILED"}
        assert 4.0 <= float(seconds) < LATE_S / 2
        await receiver.hear("freed")


@needs_link
@pytest.mark.fault("F25")
@pytest.mark.parametrize("number", [1, 8])
async def test_a_connection_reset_in_mid_pull_fails_it_at_once_and_the_next_succeeds(
    number: int,
) -> None:
    async with bad_link() as link, pair(MEDIUM, 60.0, link) as (sender, receiver, address):
        # The pull takes eight seconds, so the reset comes before its end.
        link.bytes_per_s = 5e5
        await receiver.tell(f"pull {address} t0 {LATE_S}")
        await receiver.hear(part(number, MEDIUM))
        await asyncio.to_thread(reset, sender.process.pid)
        await receiver.hear("freed")
        assert (await receiver.hear("pulled"))[2] == "KV_PEER_LOST"
        receiver.said.clear()
        link.bytes_per_s = None
        await receiver.tell(f"pull {address} t0 {LATE_S}")
        assert (await receiver.hear("pulled"))[2] == "ok"
        await sender.hear("closed t0 taken")


@needs_link
@pytest.mark.fault("F34")
@pytest.mark.parametrize("at", [500_000, 2_000_000, 3_900_000])
async def test_a_bit_flipped_on_the_wire_is_found_and_the_next_pull_succeeds(at: int) -> None:
    """TCP accepts the packet. Only the checksum of the range shows the fault."""
    async with bad_link() as link, pair(MEDIUM, 60.0, link) as (sender, receiver, address):
        link.flip_at = link.num_bytes + at
        await receiver.tell(f"pull {address} t0 {LATE_S}")
        assert (await receiver.hear("pulled"))[2] == "KV_CORRUPT"
        assert link.num_flipped == 1
        await receiver.hear("freed")
        receiver.said.clear()
        await receiver.tell(f"pull {address} t0 {LATE_S}")
        assert (await receiver.hear("pulled"))[2] == "ok"
        await sender.hear("closed t0 taken")


@needs_link
@pytest.mark.fault("F24", "F35")
async def test_a_pull_over_a_slow_link_keeps_its_lease_until_it_is_done() -> None:
    """At 4 Mbit/s, 4 MiB take 8.4 s. The lease lasts 4 s and survives only because progress and
    renewals extend it.
    """
    async with bad_link() as link, pair(MEDIUM, 4.0, link) as (sender, receiver, address):
        link.bytes_per_s = 4e6 / 8
        await receiver.tell(f"pull {address} t0 {LATE_S} 5.0")
        _, _, outcome, seconds = await receiver.hear("pulled")
        assert outcome == "ok"
        assert float(seconds) > 8.0, "the pull must last longer than two leases"
        await sender.hear("closed t0 taken")


@needs_link
@pytest.mark.fault("F24")
async def test_a_slow_long_and_lossy_link_makes_progress_and_holds_up_no_other_pull() -> None:
    """The slow link has 4 Mbit/s and 50 ms in each direction, and it loses every twentieth packet.
    Another decode has a good link to the same prefill and must not be held up.
    """
    # Each of these pulls takes some ten milliseconds, while the slow pull takes seconds.
    num_near = 3
    near_arguments = (MEDIUM.num_blocks, MEDIUM.block_bytes, 10.0, SENDER_IP)
    async with (
        bad_link() as link,
        pair(MEDIUM, 10.0, link) as (sender, far, address),
        agent("receiver", *near_arguments, beside=sender) as near,
    ):
        await near.hear("ready")
        await sender.tell(f"stage {num_near}")
        link.bytes_per_s, link.latency_s, link.loss = 4e6 / 8, 0.05, 0.05
        await far.tell(f"pull {address} t0 {LATE_S} 10.0")
        await far.hear(part(1, MEDIUM))
        for number in range(1, num_near + 1):
            await near.tell(f"pull {address} t{number} {LATE_S} 10.0")
            assert (await near.hear(f"pulled t{number}"))[2] == "ok"
        assert not any(line.startswith("pulled") for line in far.said), (
            "the slow pull is still under way"
        )
        _, _, outcome, seconds = await far.hear("pulled", 60.0)
        assert outcome == "ok", "silence is never as long as the stall"
        assert link.num_lost
        assert float(seconds) > 8.0
        await sender.hear("closed t0 taken")
