"""No request gets another request's KV if a bit of a control message changes on the way (F34).

The tests change each bit of each control message of a pull.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
import pytest

from pdmesh.core.instance.arena import ArenaRange
from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.errors import KvTransferFailed
from pdmesh.kv.agent import wire
from tests.fakes.kv.memory_transport import MemoryTransport
from tests.fakes.kv.pair import (
    KvPair,
    kv_pair,
    pattern,
    ticket_for,
)

LAYOUT = KvLayout(num_layers=1, num_blocks=1, block_bytes=64)
SIZE = LAYOUT.total_bytes
# The two names differ in one bit.
DATA = {name: pattern(SIZE, seed) for seed, name in enumerate(("t", "u"))}


@dataclass
class Flip:
    """Changes one bit of message number `message`. Messages of both directions are counted."""

    message: int
    bit: int
    num_sent: int = 0
    has_hit: bool = False
    pull_ids: set[int] = field(default_factory=set)

    def __call__(self, raw: bytes) -> bytes:
        message = wire.parse(memoryview(raw))
        if isinstance(message, wire.Pull):
            self.pull_ids.add(message.pull_id)
        number, self.num_sent = self.num_sent, self.num_sent + 1
        if number != self.message or self.bit >= 8 * len(raw):
            return raw
        self.has_hit = True
        changed = bytearray(raw)
        changed[self.bit // 8] ^= 1 << self.bit % 8
        return bytes(changed)


async def _pull_both(pair: KvPair, flip: Flip) -> None:
    for transport in (pair.sender_transport, pair.receiver_transport):
        assert isinstance(transport, MemoryTransport)
        transport.tamper = flip

    async def pull(name: str, offset: int) -> bool:
        r = ArenaRange(offset, SIZE)
        pair.landed(SIZE, offset)[:] = 0
        try:
            await pair.receiver.pull(ticket_for(pair.address, LAYOUT, name), r, deadline_s=5.0)
        except KvTransferFailed:
            return False
        assert np.array_equal(pair.landed(SIZE, offset), DATA[name]), "another request's KV"
        return True

    for number, name in enumerate(DATA):
        r = ArenaRange(4096 * (number + 1), SIZE)
        pair.sender.staging(r)[:] = DATA[name]
        pair.sender.stage(name, 1, r, LAYOUT, 30.0)
    came = await asyncio.gather(pull("t", 0), pull("u", 4096))
    assert flip.has_hit or all(came)
    if flip.message >= 0:
        one, other = flip.pull_ids
        assert (one ^ other).bit_count() == 1
    for name in DATA:
        pair.sender.release(name)
    while pair.sender.num_tickets or pair.receiver.num_pulls:
        await asyncio.sleep(0)


@pytest.mark.fault("F34")
async def test_no_bit_changed_on_the_way_gives_a_request_the_kv_of_another() -> None:
    async with kv_pair(MemoryTransport) as pair:
        await _pull_both(pair, Flip(-1, 0))  # without a change, to open the connections
        # After this third pull, the ids of each pair are 2n and 2n + 1, which differ in one bit.
        pair.stage(LAYOUT, "v")
        ticket = ticket_for(pair.address, LAYOUT, "v")
        await pair.receiver.pull(ticket, ArenaRange(0, SIZE), deadline_s=5.0)
        pair.sender.release("v")
        for message in range(6):  # PULL, META and ACK of two pulls
            bit, flip = 0, Flip(message, 0)
            await _pull_both(pair, flip)
            while flip.has_hit:
                bit += 1
                flip = Flip(message, bit)
                await _pull_both(pair, flip)
            assert bit > 8 * 20, "the message was never sent"


@pytest.mark.fault("F34")
async def test_a_sound_answer_to_another_pull_is_refused() -> None:
    """A sender that confuses two pulls gives this answer. The checksums are right, but the bytes
    belong to the other pull.
    """
    async with kv_pair(MemoryTransport) as pair:
        await _pull_both(pair, Flip(-1, 0))
        assert isinstance(pair.sender_transport, MemoryTransport)
        metas: list[wire.Meta] = []

        def swap(raw: bytes) -> bytes:
            message = wire.parse(memoryview(raw))
            if not isinstance(message, wire.Meta):
                return raw
            metas.append(message)
            other = metas[0]
            forged = wire.Meta(
                message.pull_id, other.num_bytes, other.ranges, other.inline, other.question
            )
            return b"".join(wire.encode(forged))

        pair.sender_transport.tamper = swap
        data = [pair.stage(LAYOUT, name, offset=8192 * n) for n, name in enumerate(("v", "w"))]
        pulls = [
            pair.receiver.pull(
                ticket_for(pair.address, LAYOUT, name), ArenaRange(4096 * n, SIZE), deadline_s=5.0
            )
            for n, name in enumerate(("v", "w"))
        ]
        results = await asyncio.gather(*pulls, return_exceptions=True)
        assert not all(isinstance(r, KvTransferFailed) for r in results[:1]), (
            "the answer to the first pull is right"
        )
        assert isinstance(results[1], KvTransferFailed)
        assert results[1].reason == "KV_PROTOCOL_ERROR"
        assert len(metas) == len(data) == 2
        pair.sender.release("w")
