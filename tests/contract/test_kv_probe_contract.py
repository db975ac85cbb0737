"""Probes of a connection between KV agents, and the end of the connection when the peer leaves.

Each test runs over the memory transport and over UCX.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pdmesh.core.instance.arena import ArenaRange
from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.errors import KvTransferFailed
from pdmesh.kv.agent.probes import PROBE_BYTES, probe_bytes
from pdmesh.kv.agent.types import AgentHooks
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

MakeTransport = Callable[[], KvTransport]
LAYOUT = KvLayout(4, 64, 32 << 10, FINGERPRINT)  # 8 MiB


@pytest.fixture(params=[MemoryTransport, UcxTransport], ids=["memory", "ucx"])
def transport(request: pytest.FixtureRequest) -> MakeTransport:
    make: MakeTransport = request.param
    return make


def test_the_bytes_of_a_probe_depend_on_nonce_incarnation_and_format() -> None:
    """Otherwise, a replayed answer would pass, or an answer of another instance at the same
    address.
    """
    answers = [
        probe_bytes(bytes(16), 7, 1),
        probe_bytes(bytes(15) + b"\1", 7, 1),
        probe_bytes(bytes(16), 8, 1),
        probe_bytes(bytes(16), 7, 2),
    ]
    assert all(len(a) == PROBE_BYTES for a in answers)
    assert len({a.tobytes() for a in answers}) == len(answers)


@pytest.mark.req("S16")
async def test_a_probe_comes_back_on_the_path_that_kv_takes(transport: MakeTransport) -> None:
    async with kv_pair(transport) as pair:
        for _ in range(3):
            took_s = await pair.receiver.probe(pair.address, INCARNATION, deadline_s=30)
            assert took_s > 0
        assert pair.sender.stats().bytes_sent == 3 * PROBE_BYTES
        await until(lambda: pair.sender.num_tickets == 0)
        assert not pair.sender_events, "no ticket of an engine was closed"


@pytest.mark.req("S16")
@pytest.mark.fault("F5")
async def test_a_probe_meant_for_another_incarnation_or_model_is_refused(
    transport: MakeTransport,
) -> None:
    async with kv_pair(transport) as pair:
        with pytest.raises(KvTransferFailed) as failed:
            await pair.receiver.probe(pair.address, INCARNATION + 1, deadline_s=30)
        assert failed.value.reason == "KV_REFUSED_WRONG_INCARNATION"
    async with kv_pair(transport, receiver_fingerprint="model-b") as pair:
        with pytest.raises(KvTransferFailed) as failed:
            await pair.receiver.probe(pair.address, INCARNATION, deadline_s=30)
        assert failed.value.reason == "KV_REFUSED_WRONG_MODEL"


class _FlipBit(AgentHooks):
    def on_received(self, payload: ByteArray) -> None:
        payload[payload.size // 2] ^= 1


@pytest.mark.req("S16")
@pytest.mark.fault("F34")
async def test_a_probe_that_is_corrupted_on_the_way_fails(transport: MakeTransport) -> None:
    async with kv_pair(transport, hooks=_FlipBit()) as pair:
        with pytest.raises(KvTransferFailed) as failed:
            await pair.receiver.probe(pair.address, INCARNATION, deadline_s=30)
        assert failed.value.reason == "KV_CORRUPT"


@pytest.mark.req("S16")
async def test_a_probe_of_an_absent_peer_fails_within_its_deadline(
    transport: MakeTransport,
) -> None:
    async with kv_pair(transport) as pair:
        await pair.sender.close()
        with pytest.raises(KvTransferFailed):
            await pair.receiver.probe(pair.address, INCARNATION, deadline_s=0.5)


@pytest.mark.req("S26")
async def test_a_connection_ends_when_its_peer_leaves_but_not_during_a_pull(
    transport: MakeTransport,
) -> None:
    async with kv_pair(transport) as pair:
        await pair.receiver.probe(pair.address, INCARNATION, deadline_s=30)
        data = pair.stage(LAYOUT)
        ticket = ticket_for(pair.address, LAYOUT)
        landing = ArenaRange(0, LAYOUT.total_bytes)
        await pair.receiver.pull(
            ticket,
            landing,
            deadline_s=30,
            on_range=lambda offset, part: pair.receiver.disconnect(pair.address),
        )
        assert np.array_equal(pair.landed(LAYOUT.total_bytes), data)
        await until(lambda: pair.receiver.stats().num_peers == 0)
        await until(lambda: pair.sender.stats().num_peers == 0)
        await pair.receiver.probe(pair.address, INCARNATION, deadline_s=30)
