"""The ranks of two vLLM instances probe each other over real KV agents.

The host starts the probes, and its workers send them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Iterator

import pytest

from pdmesh.core.instance.arena import ArenaRange
from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.core.kv.layout.rank_place import RankPlace
from pdmesh.core.kv.transfer.ticket import Ticket
from pdmesh.engine.base import KvPeer
from pdmesh.engine.vllm.connector.worker.peer_checks import PeerChecks, PeerProber
from pdmesh.engine.vllm.messages import Disconnect, Probed, ProbePeer, RankMessage
from pdmesh.errors import KvTransferFailed
from pdmesh.kv.agent.agent import KvAgent
from pdmesh.kv.agent.arena_memory import host_memory
from pdmesh.kv.agent.thread import AgentThread
from pdmesh.kv.agent.types import AgentIdentity
from pdmesh.kv.transport.ucx import UcxTransport
from tests.support.waiting import until

pytest.importorskip("torch")

from pdmesh.engine.vllm.connector.worker.piece_pulls import Share, pull_pieces

FINGERPRINT, INCARNATION = "m.float32", 7


def agent_thread(rank: int, incarnation: int) -> AgentThread:
    def make() -> KvAgent:
        identity = AgentIdentity("i", incarnation, FINGERPRINT, rank)
        return KvAgent(
            UcxTransport(),
            identity,
            host_memory(1 << 16, 1 << 16),
            on_event=lambda _: None,
        )

    return AgentThread(make)


@contextlib.contextmanager
def ranks(count: int, incarnation: int) -> Iterator[list[tuple[AgentThread, str]]]:
    threads = [agent_thread(rank, incarnation) for rank in range(count)]
    try:
        yield [(thread, thread.start()) for thread in threads]
    finally:
        for thread in threads:
            thread.close()


def host_of(
    receivers: list[tuple[AgentThread, str]], num_heads: int
) -> tuple[PeerChecks, list[Probed]]:
    """A host with these workers, and the list of the messages that they send to it."""
    loop, heard = asyncio.get_running_loop(), list[Probed]()

    def hear(message: RankMessage) -> None:
        assert isinstance(message, Probed)
        heard.append(message)
        loop.call_soon_threadsafe(checks.on_probed, message)

    probers = [
        PeerProber(Share(num_heads, RankPlace(rank, len(receivers))), agent, hear)
        for rank, (agent, _) in enumerate(receivers)
    ]

    def broadcast(message: RankMessage) -> None:
        assert isinstance(message, ProbePeer | Disconnect)
        for prober in probers:
            prober.handle(message)

    checks = PeerChecks(broadcast, len(receivers))
    return checks, heard


@pytest.mark.req("S16", "S26", "S57")
async def test_a_rank_probes_only_the_rank_of_its_number_until_the_peer_leaves() -> None:
    with ranks(2, INCARNATION) as senders, ranks(2, INCARNATION + 1) as receivers:
        checks, heard = host_of(receivers, num_heads=4)
        peer = KvPeer("prefill-0", INCARNATION, tuple(address for _, address in senders))
        await checks.verify(peer, 5.0)
        assert sorted(m.rank for m in heard) == [0, 1]
        assert [agent.stats().num_peers for agent, _ in senders] == [1, 1]
        checks.forget(peer)
        await until(lambda: [agent.stats().num_peers for agent, _ in senders] == [0, 0])


@pytest.mark.req("S16", "S57")
async def test_if_the_numbers_of_ranks_differ_a_rank_probes_those_whose_heads_it_needs() -> None:
    with ranks(4, INCARNATION) as senders, ranks(2, INCARNATION + 1) as receivers:
        checks, _ = host_of(receivers, num_heads=4)
        peer = KvPeer("prefill-0", INCARNATION, tuple(address for _, address in senders))
        await checks.verify(peer, 5.0)
        assert [agent.stats().num_peers for agent, _ in senders] == [1, 1, 1, 1]


@pytest.mark.req("S55", "S57")
async def test_connections_grow_with_the_ranks_and_not_with_their_square() -> None:
    """Two prefills and two decodes of two ranks each have 8 connections. With all pairs of ranks
    there would be 16.

    Pulls open no further connections.
    """
    layout = KvLayout(2, 4, 1024, FINGERPRINT, num_heads=2)
    with contextlib.ExitStack() as stack:
        prefills = [stack.enter_context(ranks(2, INCARNATION)) for _ in range(2)]
        decodes = [stack.enter_context(ranks(2, INCARNATION + 1)) for _ in range(2)]

        def num_open(side: list[list[tuple[AgentThread, str]]]) -> list[int]:
            return [agent.stats().num_peers for instance in side for agent, _ in instance]

        for decode in decodes:
            checks, _ = host_of(decode, num_heads=4)
            for number, prefill in enumerate(prefills):
                addresses = tuple(address for _, address in prefill)
                await checks.verify(KvPeer(f"prefill-{number}", INCARNATION, addresses), 5.0)
        assert num_open(prefills) == num_open(decodes) == [2] * 4

        for decode, prefill in itertools.product(decodes, prefills):
            ticket = await staged(prefill, layout)
            for rank, (agent, _) in enumerate(decode):
                landing = ArenaRange(0, layout.total_bytes)
                wanted = Share(4, RankPlace(rank, 2)).pieces(ticket, landing, layout.total_bytes)
                pull = pull_pieces(
                    agent,
                    ticket,
                    wanted,
                    leg=1,
                    deadline_s=20,
                    stall_s=20,
                    first_block=0,
                    num_blocks=4,
                )
                over = asyncio.Event()
                loop = asyncio.get_running_loop()
                pull.start(lambda loop=loop, over=over: loop.call_soon_threadsafe(over.set))  # type: ignore[misc]
                await over.wait()
                assert pull.error() is None
        assert num_open(prefills) == num_open(decodes) == [2] * 4


async def staged(prefill: list[tuple[AgentThread, str]], layout: KvLayout) -> Ticket:
    """Stage a prompt on every rank. Returns its ticket."""
    ticket_id, size = secrets.token_hex(8), layout.total_bytes
    for agent, _ in prefill:
        await asyncio.wrap_future(agent.stage(ticket_id, 0, ArenaRange(0, size), layout, 20.0))
    addresses = tuple(address for _, address in prefill)
    return Ticket(ticket_id, "r", 0, "i", INCARNATION, FINGERPRINT, 64, size, addresses, 20_000)


@pytest.mark.req("S16")
@pytest.mark.fault("F5")
async def test_one_rank_of_another_instance_fails_the_peer() -> None:
    with (
        ranks(1, INCARNATION) as old,
        ranks(1, INCARNATION + 5) as new,
        ranks(2, INCARNATION + 1) as receivers,
    ):
        checks, _ = host_of(receivers, num_heads=4)
        peer = KvPeer("prefill-0", INCARNATION, (old[0][1], new[0][1]))
        with pytest.raises(KvTransferFailed, match="rank 1") as failed:
            await checks.verify(peer, 5.0)
        assert failed.value.reason == "KV_REFUSED_WRONG_INCARNATION"


@pytest.mark.req("S16")
async def test_heads_that_do_not_divide_and_ranks_that_are_silent_are_failures_too() -> None:
    with ranks(1, INCARNATION + 1) as receivers:
        checks, _ = host_of(receivers, num_heads=4)
        with pytest.raises(KvTransferFailed) as failed:
            await checks.verify(KvPeer("p", INCARNATION, ("a:1", "b:1", "c:1")), 0.2)
        assert failed.value.reason == "KV_FORMAT_MISMATCH"
    silent = PeerChecks(lambda _: None, 1)
    with pytest.raises(KvTransferFailed) as failed:
        await silent.verify(KvPeer("p", INCARNATION, ("a:1",)), 0.01)
    assert failed.value.reason == "KV_TRANSFER_TIMEOUT"
