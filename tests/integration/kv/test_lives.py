"""Tests a process that runs several incarnations of an instance, one after another, and starts its
KV transport again for each (ADR 0016, ADR 0024). Peers connect while an incarnation ends, or to an
incarnation that has ended.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pdmesh.errors import KvTransferFailed
from pdmesh.kv.transport import ucx
from pdmesh.kv.transport.base import KvConnection
from pdmesh.kv.transport.ucx import UcxTransport
from tests.support.waiting import until

ROOT = Path(__file__).parents[3]
NUM_LIVES, NUM_PEERS = 60, 8
CONNECT_S = 5.0


class IgnoresEvents:
    def on_connected(self, connection: KvConnection) -> None: ...
    def on_message(self, connection: KvConnection, message: memoryview) -> None: ...
    def on_closed(self, connection: KvConnection, reason: str) -> None: ...


@asynccontextmanager
async def life() -> AsyncIterator[tuple[UcxTransport, str]]:
    transport = UcxTransport()
    try:
        yield transport, await transport.start(IgnoresEvents())
    finally:
        await transport.close()


async def come_and_go(peer: UcxTransport, address: str) -> None:
    try:
        connection = await peer.connect(address, CONNECT_S)
    except KvTransferFailed:
        return
    connection.send([bytes(100)])
    await asyncio.sleep(0.01)
    connection.abort("done")


@pytest.mark.req("S23", "S36")
@pytest.mark.fault("F37", "F42")
async def test_a_transport_may_end_at_any_moment_while_peers_connect() -> None:
    """The nemesis, a test with random faults, found this fault. An instance was erased while its
    peers connected, and died by signal 11 in UCX.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.fakes.kv.lives_process", str(NUM_LIVES), "1",
        stdout=PIPE, cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/libs"},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with life() as (peer, _), asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            num_lives = 0
            async for line in process.stdout:
                if not line.startswith(b"ucx:"):
                    assert b"kv.not_warm" in line, line  # slow machines log this line
                    continue
                num_lives += 1
                for _ in range(NUM_PEERS):
                    tasks.create_task(come_and_go(peer, line.decode().strip()))
            assert await process.wait() == 0
            assert num_lives == NUM_LIVES
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.req("S23", "S36")
@pytest.mark.fault("F5")
async def test_a_peer_that_asks_for_an_earlier_incarnation_is_refused_on_the_same_port() -> None:
    async with life() as (peer, _):
        async with life() as (_, first):
            (await peer.connect(first, CONNECT_S)).abort("done")
        async with life() as (_, second):
            assert first.partition("/")[0] == second.partition("/")[0]
            with pytest.raises(KvTransferFailed) as caught:
                await peer.connect(first, CONNECT_S)
            assert caught.value.reason == "KV_CONNECT_FAILED"
            (await peer.connect(second, CONNECT_S)).abort("done")


@pytest.mark.req("S23")
@pytest.mark.fault("F5")
async def test_between_two_incarnations_peers_are_refused_at_once() -> None:
    """A process between two incarnations must refuse a peer at once. The peer must not wait until
    its own deadline.
    """
    async with life() as (peer, _):
        async with life() as (_, address):
            pass
        for _ in range(5):
            with pytest.raises(KvTransferFailed):
                async with asyncio.timeout(60):  # far below the deadline of `connect`
                    await peer.connect(address, 600.0)


@pytest.mark.fault("F5")
async def test_the_number_of_a_connection_is_never_used_again_in_a_later_incarnation() -> None:
    """The tags of payloads contain this number. A late byte of an earlier incarnation must not
    match a receive of a later one.
    """
    keys = []
    async with life() as (_, address):
        for _ in range(3):
            async with life() as (peer, _):
                keys.append((await peer.connect(address, CONNECT_S)).key)
    assert len(set(keys)) == len(keys)


@pytest.mark.fault("F4")
async def test_a_worker_that_may_still_touch_memory_is_never_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test sets the time to wait for posted requests to 0. This has the same effect as a peer
    that keeps a posted request busy for too long.
    """
    async with life() as (peer, _):
        async with life() as (transport, first):
            await peer.connect(first, CONNECT_S)
            await until(lambda: transport.num_connections == 1)
            monkeypatch.setattr(ucx, "_DRAIN_S", 0.0)
        monkeypatch.undo()
        async with life() as (_, second):
            assert first.partition("/")[0] != second.partition("/")[0]
            (await peer.connect(second, CONNECT_S)).abort("done")
