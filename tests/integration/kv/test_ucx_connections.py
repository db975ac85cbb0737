"""Tests that the end of one UCX connection ends no other connection. The other one may be newer, or
the peer may have opened it at the same time.

UCX pairs the endpoints of two workers in the order in which each side made them. Once, the two ends
of a connection could belong to two different pairs. UCX's next keepalive could then end the
connection, in one case during its first pull.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from pdmesh.errors import KvTransferFailed
from pdmesh.kv.transport import ucx
from pdmesh.kv.transport.base import KvConnection
from pdmesh.kv.transport.ucx import UcxTransport
from pdmesh.kv.transport.ucx_connection import PEER_GONE, UcxConnection
from pdmesh.kv.transport.ucx_handshake import parse_address
from pdmesh.kv.transport.ucx_worker import options_for
from tests.fakes.kv.pair import INCARNATION, kv_pair
from tests.support.waiting import until

NUM_PAIRS, NUM_CONNECTIONS = 30, 5


async def say_hello_in_vain(transport: UcxTransport, address: str) -> None:
    """Send a hello that gets no answer, as if the peer were frozen."""
    stranger = replace(parse_address(address), key=bytes(16))
    with pytest.raises(KvTransferFailed):
        await transport.connect(str(stranger), 0.05)


@pytest.mark.fault("F4", "F25")
async def test_hellos_without_an_answer_cost_no_later_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the two sides numbered their endpoints in step, about half of these pairs lost a
    connection.
    """
    often = {"KEEPALIVE_INTERVAL": "50ms"}
    monkeypatch.setattr(ucx, "options_for", lambda *a, **kw: options_for(*a, **kw) | often)
    rng = random.Random(3)
    for number in range(NUM_PAIRS):
        async with kv_pair(UcxTransport) as pair:
            if number % 3 == 0:
                sides = [pair.sender, pair.receiver]
                rng.shuffle(sides)
                transport = sides[0]._transport
                assert isinstance(transport, UcxTransport)
                await say_hello_in_vain(transport, sides[1].address)
            for _ in range(NUM_CONNECTIONS):
                await pair.receiver.probe(pair.address, INCARNATION, deadline_s=30)
                pair.receiver.disconnect(pair.address)
                await until(lambda: pair.receiver.stats().num_peers == 0)
                await until(lambda: pair.sender.stats().num_peers == 0)


class Side:
    """A transport, and the connections that it accepted from peers."""

    def __init__(self) -> None:
        self.transport, self.address = UcxTransport(), ""
        self.accepted: list[KvConnection] = []

    def on_connected(self, connection: KvConnection) -> None:
        self.accepted.append(connection)

    def on_message(self, connection: KvConnection, message: memoryview) -> None: ...

    def on_closed(self, connection: KvConnection, reason: str) -> None: ...

    async def connect(self, to: Side) -> KvConnection:
        return await self.transport.connect(to.address, 30)


@asynccontextmanager
async def two_sides() -> AsyncIterator[tuple[Side, Side]]:
    sides = Side(), Side()
    for side in sides:
        side.address = await side.transport.start(side)
    try:
        yield sides
    finally:
        for side in sides:
            await side.transport.close()


def turn_of(connection: KvConnection) -> int:
    assert isinstance(connection, UcxConnection)
    assert connection.endpoint is not None
    return connection.endpoint.turn


@pytest.mark.fault("F25")
@pytest.mark.parametrize("num_in_vain", [0, 3])
async def test_both_ends_of_a_connection_are_one_pair_though_two_connections_cross(
    num_in_vain: int,
) -> None:
    async with two_sides() as (a, b):
        for _ in range(num_in_vain):
            await say_hello_in_vain(a.transport, b.address)
        for _ in range(8):
            to_b, to_a = await asyncio.gather(a.connect(b), b.connect(a))
            assert turn_of(to_b) == turn_of(b.accepted[-1])
            assert turn_of(to_a) == turn_of(a.accepted[-1])
            to_b.abort("the test ends it")
            to_a.abort("the test ends it")
            await until(lambda: not a.transport.num_connections + b.transport.num_connections)


@pytest.mark.fault("F25")
@pytest.mark.parametrize("num_lost", [2, ucx._MAX_OPENINGS])
async def test_an_opening_that_ucx_ends_before_the_welcome_is_made_anew(
    num_lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX may pair a new endpoint with an endpoint that the peer closed with an older connection.
    `connect` then tries again, and fails after several such openings in a row.
    """
    is_made = num_lost < ucx._MAX_OPENINGS
    async with two_sides() as (a, b):
        openings = 0
        greet = a.transport._say_hello

        def lose_the_first(connection: UcxConnection, *rest: Any) -> None:
            nonlocal openings
            openings += 1
            greet(connection, *rest)
            if openings <= num_lost:
                connection.lose(PEER_GONE)
                ucx._settle(connection.greeted, PEER_GONE)

        monkeypatch.setattr(a.transport, "_say_hello", lose_the_first)
        if is_made:
            await a.connect(b)
        else:
            with pytest.raises(KvTransferFailed, match=PEER_GONE) as lost:
                await a.connect(b)
            assert lost.value.reason == "KV_CONNECT_FAILED"
        assert num_lost + is_made <= openings <= ucx._MAX_OPENINGS  # UCX itself may end some more
        await until(lambda: a.transport.num_connections == is_made)
