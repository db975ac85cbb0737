"""The promises of KV transports on which the KV agent relies.

The KV agent stages and pulls the KV of one rank. Each test runs over the memory transport and over
UCX.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import numpy as np
import pytest

from pdmesh.core.instance.arena import ArenaRange
from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.engine.base import KvPeer
from pdmesh.errors import KvTransferFailed
from pdmesh.kv.agent import wire
from pdmesh.kv.agent.types import AgentHooks, AgentLandingFreed, AgentTicketClosed
from pdmesh.kv.transport import ucx
from pdmesh.kv.transport.base import ByteArray, KvTransport
from pdmesh.kv.transport.ucx import UcxTransport
from tests.fakes.kv.memory_transport import MemoryTransport
from tests.fakes.kv.pair import (
    FINGERPRINT,
    INCARNATION,
    kv_pair,
    ticket_for,
)
from tests.support.waiting import until


def loop_time() -> float:
    return asyncio.get_running_loop().time()


MakeTransport = Callable[[], KvTransport]
SMALL = KvLayout(4, 2, 512, FINGERPRINT)  # small enough to be part of the META message
LARGE = KvLayout(4, 8, 16_384, FINGERPRINT)  # 512 KiB, which need a message of their own
LAYOUTS = pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])


@pytest.fixture(params=[MemoryTransport, UcxTransport], ids=["memory", "ucx"])
def transport(request: pytest.FixtureRequest) -> MakeTransport:
    make: MakeTransport = request.param
    return make


@LAYOUTS
@pytest.mark.req("S41", "S47", "S49")
async def test_a_pull_brings_the_staged_bytes_and_closes_the_ticket(
    transport: MakeTransport, layout: KvLayout
) -> None:
    async with kv_pair(transport) as pair:
        data = pair.stage(layout)
        landing = ArenaRange(0, layout.total_bytes)
        result = await pair.receiver.pull(ticket_for(pair.address, layout), landing, deadline_s=30)
        assert result.num_bytes == layout.total_bytes
        assert (pair.landed(layout.total_bytes) == data).all()
        await until(lambda: pair.sender_events == [AgentTicketClosed("t", "taken")])
        assert pair.receiver_events == [], "the landing range is the caller's"


@LAYOUTS
@pytest.mark.parametrize("first_block", [1, -1])
async def test_a_pull_can_leave_out_the_first_blocks_of_each_layer(
    transport: MakeTransport, layout: KvLayout, first_block: int
) -> None:
    # -1 stands for all blocks: none is pulled, and only the acknowledgement is sent
    first = first_block % (layout.num_blocks + 1)
    async with kv_pair(transport) as pair:
        data = pair.stage(layout)
        ticket = ticket_for(pair.address, layout)
        result = await pair.receiver.pull(
            ticket, ArenaRange(0, layout.total_bytes), deadline_s=30, first_block=first
        )
        blocks = data.reshape(layout.num_layers, layout.num_blocks, layout.block_bytes)
        wanted = blocks[:, first:].reshape(-1)
        assert result.num_bytes == wanted.size
        assert (pair.landed(wanted.size) == wanted).all()
        await until(lambda: pair.sender_events == [AgentTicketClosed("t", "taken")])


async def test_many_pulls_share_one_connection(transport: MakeTransport) -> None:
    async with kv_pair(transport) as pair:
        size = LARGE.total_bytes
        data = [
            pair.stage(layout, f"t{i}", offset=i * size)
            for i, layout in enumerate([LARGE, SMALL] * 8)
        ]
        pulls = [
            pair.receiver.pull(
                ticket_for(pair.address, layout, f"t{i}"), ArenaRange(i * size, size), deadline_s=60
            )
            for i, layout in enumerate([LARGE, SMALL] * 8)
        ]
        await asyncio.gather(*pulls)
        for i, expected in enumerate(data):
            assert (pair.landed(expected.size, i * size) == expected).all()
        assert pair.sender_transport.num_connections == 1  # type: ignore[attr-defined]


async def refused(pair_: object, **changes: object) -> str:
    pair = pair_
    with pytest.raises(KvTransferFailed) as caught:
        await pair.receiver.pull(  # type: ignore[attr-defined]
            ticket_for(pair.address, SMALL, **changes),  # type: ignore[attr-defined, arg-type]
            ArenaRange(0, 1 << 16),
            deadline_s=30,
        )
    return caught.value.reason


@pytest.mark.fault("F4", "F5", "F34", "F35")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"incarnation": 8}, "KV_REFUSED_WRONG_INCARNATION"),
        ({"attempt": 2}, "KV_REFUSED_WRONG_ATTEMPT"),
        ({"ticket_id": "other"}, "KV_REFUSED_UNKNOWN_TICKET"),
    ],
)
async def test_a_ticket_of_another_incarnation_attempt_or_name_is_refused(
    transport: MakeTransport, changes: dict[str, object], reason: str
) -> None:
    async with kv_pair(transport) as pair:
        pair.stage(SMALL)
        assert await refused(pair, **changes) == reason
        assert pair.receiver_events == [AgentLandingFreed(0)]
        assert pair.sender.num_tickets == 1, "a refusal costs the ticket nothing"


@pytest.mark.fault("F39")
async def test_a_ticket_number_without_its_secret_is_refused_and_no_error_shows_either(
    transport: MakeTransport,
) -> None:
    """Logs, operators and clients see these errors, which must not enable them to pull KV."""
    secret, wrong = "5" * 32, "6" * 32
    async with kv_pair(transport) as pair:
        pair.stage(SMALL, f"1f-{secret}")
        whole = ArenaRange(0, SMALL.total_bytes)
        for ticket_id in ("1f", "1f-", f"1f-{wrong}", f"1f-{secret[:-1]}", f"1e-{secret}", secret):
            ticket = ticket_for(pair.address, SMALL, ticket_id)
            with pytest.raises(KvTransferFailed) as caught:
                await pair.receiver.pull(ticket, whole, deadline_s=30)
            assert caught.value.reason == "KV_REFUSED_UNKNOWN_TICKET"
            pull = wire.Pull(1, ticket_id, 1, INCARNATION, 0)
            for shown in (caught.value.message, str(ticket), str(pull)):
                assert not {secret, secret[:-1], wrong} & set(re.findall("[0-9a-f]+", shown))
        assert pair.sender.num_tickets == 1
        await pair.receiver.pull(
            ticket_for(pair.address, SMALL, f"1f-{secret}"), whole, deadline_s=30
        )


@pytest.mark.fault("F39")
async def test_no_error_shows_the_address_with_the_handshake_key(transport: MakeTransport) -> None:
    """The handshake key is part of the address. Whoever has the key can ask for KV."""
    async with kv_pair(transport) as pair:
        await pair.sender.close()
        ticket = ticket_for(pair.address, SMALL)
        with pytest.raises(KvTransferFailed) as caught:
            await pair.receiver.pull(ticket, ArenaRange(0, SMALL.total_bytes), deadline_s=1.0)
        for shown in (caught.value.message, str(ticket), str(KvPeer("p", 1, (pair.address,)))):
            assert not any(part in shown for part in re.split("[./]", pair.address) if part)


@pytest.mark.fault("F34")
async def test_another_model_is_refused(transport: MakeTransport) -> None:
    async with kv_pair(transport, receiver_fingerprint="model-b") as pair:
        pair.stage(SMALL)
        assert await refused(pair) == "KV_REFUSED_WRONG_MODEL"


@pytest.mark.req("S13")
async def test_another_group_is_refused(transport: MakeTransport) -> None:
    async with kv_pair(transport, receiver_group="other") as pair:
        pair.stage(SMALL)
        assert await refused(pair) == "KV_REFUSED_WRONG_GROUP"
        assert pair.receiver_events == [AgentLandingFreed(0)]
        assert pair.sender.stats().bytes_sent == 0
        assert pair.sender.num_tickets == 1, "a refusal costs the ticket nothing"


class FlipOneBit(AgentHooks):
    def on_received(self, payload: ByteArray) -> None:
        payload[payload.size // 2] ^= 1


@LAYOUTS
@pytest.mark.fault("F34")
async def test_one_flipped_bit_fails_the_pull_but_keeps_the_ticket(
    transport: MakeTransport, layout: KvLayout
) -> None:
    async with kv_pair(transport, hooks=FlipOneBit()) as pair:
        pair.stage(layout)
        landing = ArenaRange(0, layout.total_bytes)
        with pytest.raises(KvTransferFailed) as caught:
            await pair.receiver.pull(ticket_for(pair.address, layout), landing, deadline_s=30)
        assert caught.value.reason == "KV_CORRUPT"
        assert pair.receiver_events == [AgentLandingFreed(0)]
        assert pair.sender.num_tickets == 1


class ZeroOnArrival(AgentHooks):
    def on_verified(self, payload: ByteArray) -> None:
        payload[:] = 0


async def test_the_negative_control_zeroes_verified_bytes(transport: MakeTransport) -> None:
    async with kv_pair(transport, hooks=ZeroOnArrival()) as pair:
        pair.stage(SMALL)
        landing = ArenaRange(0, SMALL.total_bytes)
        await pair.receiver.pull(ticket_for(pair.address, SMALL), landing, deadline_s=30)
        assert not pair.landed(SMALL.total_bytes).any()


class DropAnswers(AgentHooks):
    def is_dropped(self, pull_id: int) -> bool:
        return True


@pytest.mark.fault("F4", "F25")
async def test_a_lost_answer_fails_at_the_deadline_and_frees_the_landing(
    transport: MakeTransport,
) -> None:
    async with kv_pair(transport, hooks=DropAnswers()) as pair:
        pair.stage(LARGE)
        await pair.receiver.connect(pair.address)
        started = asyncio.get_running_loop().time()
        with pytest.raises(KvTransferFailed) as caught:
            await pair.receiver.pull(
                ticket_for(pair.address, LARGE), ArenaRange(0, LARGE.total_bytes), deadline_s=0.2
            )
        assert caught.value.reason == "KV_TRANSFER_TIMEOUT"
        assert asyncio.get_running_loop().time() - started >= 0.2
        await until(lambda: pair.receiver_events == [AgentLandingFreed(0)])


@pytest.mark.fault("F35")
async def test_the_end_of_the_lease_frees_a_ticket_that_is_never_pulled(
    transport: MakeTransport,
) -> None:
    async with kv_pair(transport) as pair:
        staged = loop_time()
        pair.stage(SMALL, lease_s=0.1)
        await until(lambda: pair.sender_events == [AgentTicketClosed("t", "expired")])
        assert loop_time() - staged >= 0.1, "not before"
        assert await refused(pair) == "KV_REFUSED_UNKNOWN_TICKET"


@pytest.mark.fault("F35")
async def test_a_waiting_receiver_renews_the_lease_until_it_gives_up(
    transport: MakeTransport,
) -> None:
    async with kv_pair(transport) as pair:
        pair.stage(SMALL, lease_s=2.0)
        staged = loop_time()
        ticket = ticket_for(pair.address, SMALL, lease_ms=2000)
        await pair.receiver.keep(ticket, for_s=60)
        await until(lambda: pair.sender.num_tickets == 0 or loop_time() - staged > 6.0)
        assert pair.sender.num_tickets == 1, "three leases later the ticket is still open"
        pair.receiver.stop_renewing("t")
        await until(lambda: pair.sender_events == [AgentTicketClosed("t", "expired")])


@pytest.mark.fault("F27")
async def test_a_released_ticket_is_freed_and_refused(transport: MakeTransport) -> None:
    async with kv_pair(transport) as pair:
        pair.stage(SMALL)
        pair.sender.release("t")
        pair.sender.release("t")
        assert pair.sender_events == [AgentTicketClosed("t", "released")]
        assert await refused(pair) == "KV_REFUSED_UNKNOWN_TICKET"


@pytest.mark.fault("F27")
async def test_a_cancelled_pull_frees_its_landing_and_keeps_the_ticket(
    transport: MakeTransport,
) -> None:
    async with kv_pair(transport) as pair:
        pair.stage(LARGE)
        ticket, landing = ticket_for(pair.address, LARGE), ArenaRange(0, LARGE.total_bytes)
        await pair.receiver.connect(pair.address)  # so that the pull starts at once
        pull = asyncio.create_task(pair.receiver.pull(ticket, landing, deadline_s=30))
        await asyncio.sleep(0)
        pull.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pull
        await until(lambda: pair.receiver_events == [AgentLandingFreed(0)])
        await until(lambda: pair.receiver.num_pulls == 0)
        assert pair.sender.num_tickets == 1
        await pair.receiver.pull(ticket, landing, deadline_s=30)


@pytest.mark.fault("F2", "F5")
async def test_a_pull_from_an_unused_address_fails_within_the_deadline(
    transport: MakeTransport,
) -> None:
    async with kv_pair(transport) as pair:
        await pair.sender.close()
        with pytest.raises(KvTransferFailed) as caught:
            await pair.receiver.pull(
                ticket_for(pair.address, SMALL), ArenaRange(0, 1 << 16), deadline_s=1.0
            )
        assert caught.value.reason in {"KV_CONNECT_FAILED", "KV_TRANSFER_TIMEOUT"}
        assert pair.receiver_events == [AgentLandingFreed(0)]


async def test_an_agent_that_has_just_started_has_no_connection(transport: MakeTransport) -> None:
    """The agent may connect to itself to pay the cost of a first connection. This connection is not
    counted.
    """
    async with kv_pair(transport) as pair:
        assert pair.sender_transport.num_connections == 0  # type: ignore[attr-defined]
        assert pair.sender.stats().num_peers == 0


async def test_two_hundred_pulls_leave_nothing_behind(transport: MakeTransport) -> None:
    async with kv_pair(transport) as pair:
        for i in range(200):
            layout = LARGE if i % 10 == 0 else SMALL
            pair.stage(layout, f"t{i}")
            await pair.receiver.pull(
                ticket_for(pair.address, layout, f"t{i}"),
                ArenaRange(0, layout.total_bytes),
                deadline_s=30,
            )
        await until(lambda: len(pair.sender_events) == 200)
        assert pair.sender.num_tickets == 0
        assert pair.receiver.num_pulls == 0


async def test_a_strided_payload_is_refused(transport: MakeTransport) -> None:
    """UCX would silently send the wrong bytes of a strided array."""
    async with kv_pair(transport) as pair:
        connection = await pair.receiver_transport.connect(pair.address, 2.0)
        with pytest.raises(AssertionError):
            connection.send_payload(1, np.zeros(64, np.uint8)[::2], lambda: None)


@pytest.mark.fault("F2")
async def test_a_peer_that_dies_between_greeting_and_answer_fails_the_pull(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer dies after its greeting, before the connecting side has run again.

    Without a check, the connecting side would never notice the loss.
    """
    settle = ucx._settle

    def settle_and_die(future: asyncio.Future[None] | None, refusal: str) -> None:
        settle(future, refusal)
        if future is None or refusal:
            return
        for connection in pair.receiver_transport._by_number.values():  # type: ignore[attr-defined]
            connection.lose("the peer is gone")

    monkeypatch.setattr(ucx, "_settle", settle_and_die)
    async with kv_pair(UcxTransport) as pair:
        pair.stage(SMALL, lease_s=5.0)
        landing = ArenaRange(0, SMALL.total_bytes)
        with pytest.raises(KvTransferFailed):
            async with asyncio.timeout(60):
                await pair.receiver.pull(ticket_for(pair.address, SMALL), landing, deadline_s=5)
        await until(lambda: pair.receiver_events == [AgentLandingFreed(0)])
        assert pair.receiver.num_pulls == 0
