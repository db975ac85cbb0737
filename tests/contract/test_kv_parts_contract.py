"""The contract of KV agents for pulls in parts and for fetches of blocks.

A pull transfers the KV of one prompt, even while later layers are still computed. A part is the
piece of KV that one step of a pull moves. A fetch reads blocks by name from a peer's pool. Each
test runs over the memory transport and over UCX.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import xxhash

from pdmesh.core.instance.arena import ArenaRange
from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.core.kv.transfer.pull_parts import CHUNK_BYTES
from pdmesh.errors import KvTransferFailed
from pdmesh.kv.agent.agent import KvAgent
from pdmesh.kv.agent.arena_memory import host_memory
from pdmesh.kv.agent.checksums import checksum
from pdmesh.kv.agent.types import (
    AgentHooks,
    AgentIdentity,
    AgentLandingFreed,
    AgentTicketClosed,
    PinnedBlocks,
)
from pdmesh.kv.transport.base import ByteArray, KvTransport
from pdmesh.kv.transport.ucx import UcxTransport
from tests.fakes.kv.memory_transport import MemoryTransport
from tests.fakes.kv.pair import (
    FINGERPRINT,
    INCARNATION,
    KvPair,
    kv_pair,
    pattern,
    ticket_for,
)
from tests.support.waiting import until

MakeTransport = Callable[[], KvTransport]
SMALL = KvLayout(4, 2, 512, FINGERPRINT)
LAYERS = KvLayout(8, 8, 32 << 10, FINGERPRINT)  # 256 KiB per layer, 2 MiB in all
HEADS = KvLayout(8, 8, 32 << 10, FINGERPRINT, num_heads=4)
LAYER_BYTES = LAYERS.total_bytes // LAYERS.num_layers


@pytest.fixture(params=[MemoryTransport, UcxTransport], ids=["memory", "ucx"])
def transport(request: pytest.FixtureRequest) -> MakeTransport:
    make: MakeTransport = request.param
    return make


def whole(layout: KvLayout) -> ArenaRange:
    return ArenaRange(0, layout.total_bytes)


class Ranges:
    """An `on_range` callback that copies the bytes that it gets."""

    def __init__(self, size: int) -> None:
        self.copy = np.zeros(size, np.uint8)
        self.offsets: list[int] = []
        self.end = 0

    def __call__(self, offset: int, data: ByteArray) -> None:
        assert offset == self.end, "in order, without gaps"
        self.end += data.size
        self.offsets.append(offset)
        self.copy[offset : self.end] = data


def open_ticket(pair: KvPair, layout: KvLayout, chunk_bytes: int) -> ByteArray:
    pair.sender.open("t", 1, whole(layout), layout, 5.0, chunk_bytes=chunk_bytes)
    return pattern(layout.total_bytes)


def write_layer(pair: KvPair, layout: KvLayout, data: ByteArray, layer: int) -> None:
    size = layout.total_bytes // layout.num_layers
    start = layer * size
    pair.sender.staging(whole(layout))[start : start + size] = data[start : start + size]
    pair.sender.ready("t", layer + 1)


@pytest.mark.req("S48", "S49", "S51")
@pytest.mark.parametrize("chunk_layers", [1, 2, 3])
async def test_layers_arrive_before_later_layers_are_computed(
    transport: MakeTransport, chunk_layers: int
) -> None:
    """The decode asks for the KV before the prefill computes it, and gets the same bytes as with KV
    that is handed over whole.
    """
    async with kv_pair(transport) as pair:
        data = open_ticket(pair, LAYERS, chunk_layers * LAYER_BYTES)
        ranges = Ranges(data.size)
        ticket = ticket_for(pair.address, LAYERS)
        pull = asyncio.create_task(
            pair.receiver.pull(ticket, whole(LAYERS), deadline_s=30, on_range=ranges)
        )
        await until(lambda: pair.receiver.stats().messages_sent.get("pull"))
        for layer in range(LAYERS.num_layers):
            write_layer(pair, LAYERS, data, layer)
            done = (layer + 1) // chunk_layers * chunk_layers
            done = layer + 1 if layer + 1 == LAYERS.num_layers else done
            await until(lambda done=done: ranges.end == done * LAYER_BYTES)
        result = await pull
        assert (ranges.copy == data).all()
        assert (pair.landed(data.size) == data).all()
        num_parts = -(-LAYERS.num_layers // chunk_layers)
        assert (result.num_metas, result.num_ranges) == (num_parts, num_parts)
        assert 0 < result.first_range_s < result.duration_s
        await until(lambda: pair.sender_events == [AgentTicketClosed("t", "taken")])


@pytest.mark.req("S48")
@pytest.mark.parametrize("first_block", [0, 3])
async def test_both_triggers_and_every_part_size_give_the_same_bytes(
    transport: MakeTransport, first_block: int
) -> None:
    blocks = pattern(LAYERS.total_bytes).reshape(8, 8, -1)[:, first_block:].reshape(-1)
    for chunk_bytes in (8 << 20, LAYER_BYTES, 100_000):
        for is_whole in (True, False):
            async with kv_pair(transport) as pair:
                data = open_ticket(pair, LAYERS, chunk_bytes)
                if is_whole:
                    pair.sender.staging(whole(LAYERS))[:] = data
                    pair.sender.ready("t", LAYERS.num_layers)
                ranges = Ranges(blocks.size)
                pull = asyncio.create_task(
                    pair.receiver.pull(
                        ticket_for(pair.address, LAYERS),
                        whole(LAYERS),
                        deadline_s=30,
                        first_block=first_block,
                        on_range=ranges,
                    )
                )
                for layer in range(0 if is_whole else LAYERS.num_layers):
                    write_layer(pair, LAYERS, data, layer)
                    await asyncio.sleep(0)
                result = await pull
                assert result.num_bytes == blocks.size
                assert (ranges.copy == blocks).all()


@pytest.mark.req("S49")
@pytest.mark.parametrize("num_blocks", [2, 64])
async def test_the_number_of_control_messages_depends_on_ranges_not_on_blocks(
    transport: MakeTransport, num_blocks: int
) -> None:
    layout = KvLayout(8, num_blocks, (1 << 20) // num_blocks, FINGERPRINT)  # 8 MiB in both cases
    for chunk_bytes, num_metas in ((8 << 20, 1), (2 << 20, 4), (1 << 20, 8)):
        async with kv_pair(transport) as pair:
            open_ticket(pair, layout, chunk_bytes)
            pair.sender.ready("t", layout.num_layers)
            await pair.receiver.pull(ticket_for(pair.address, layout), whole(layout), deadline_s=30)
            await until(lambda: pair.sender.num_tickets == 0)
            assert pair.sender.stats().messages_sent == {"meta": num_metas}
            assert pair.receiver.stats().messages_sent == {"pull": 1, "ack": 1}


@pytest.mark.req("S48", "S49")
async def test_a_small_prompt_costs_three_messages_in_either_mode(transport: MakeTransport) -> None:
    for is_early in (False, True):
        async with kv_pair(transport) as pair:
            data = open_ticket(pair, SMALL, 1 << 20)
            pair.sender.staging(whole(SMALL))[:] = data
            if not is_early:
                pair.sender.ready("t", 4)
            pull = asyncio.create_task(
                pair.receiver.pull(ticket_for(pair.address, SMALL), whole(SMALL), deadline_s=30)
            )
            if is_early:
                await until(lambda: pair.sender.stats().num_sends)
                for layer in range(4):
                    pair.sender.ready("t", layer + 1)
            await pull
            await until(lambda: pair.sender.num_tickets == 0)
            sent = pair.sender.stats().messages_sent, pair.receiver.stats().messages_sent
            assert sent == ({"meta": 1}, {"pull": 1, "ack": 1})


@pytest.mark.req("S57")
async def test_each_rank_pulls_its_own_heads_of_every_layer(
    transport: MakeTransport,
) -> None:
    async with kv_pair(transport) as pair:
        data = pair.stage(HEADS)
        by_head = data.reshape(8, 4, -1)
        other = await another_rank(transport)
        ticket = ticket_for(pair.address, HEADS)
        for agent, heads in ((pair.receiver, (0, 1)), (other, (1, 3))):
            assert pair.sender.num_tickets == 1
            result = await agent.pull(
                ticket, whole(HEADS), deadline_s=30, heads=heads, num_takers=2
            )
            wanted = by_head[:, heads[0] : sum(heads)].reshape(-1)
            assert (agent.landing(ArenaRange(0, result.num_bytes)) == wanted).all()
        await until(lambda: pair.sender_events == [AgentTicketClosed("t", "taken")])
        await other.close()


async def another_rank(transport: MakeTransport) -> KvAgent:
    """A second rank beside the pair's receiver."""
    agent = KvAgent(
        transport(),
        AgentIdentity("decode-0", INCARNATION + 1, FINGERPRINT, group_id="g"),
        host_memory(0, HEADS.total_bytes),
        on_event=lambda _: None,
    )
    await agent.start()
    return agent


async def test_a_pull_that_begins_while_another_connects_is_served(
    transport: MakeTransport,
) -> None:
    async with kv_pair(transport) as pair:
        size, pulls = SMALL.total_bytes, []
        for i in range(40):
            pair.stage(SMALL, f"t{i}")
        for i in range(40):
            ticket = ticket_for(pair.address, SMALL, f"t{i}")
            pull = pair.receiver.pull(ticket, ArenaRange(i * size, size), deadline_s=30)
            pulls.append(asyncio.create_task(pull))
            await asyncio.sleep(0)  # let the event loop run once
        await asyncio.wait_for(asyncio.gather(*pulls), 30)


# -- faults ---------------------------------------------------------------------------------------


@pytest.mark.fault("F27")
async def test_releasing_an_open_ticket_fails_the_pull_that_waits_for_it(
    transport: MakeTransport,
) -> None:
    async with kv_pair(transport) as pair:
        data = open_ticket(pair, LAYERS, LAYER_BYTES)
        ranges = Ranges(data.size)
        pull = asyncio.create_task(
            pair.receiver.pull(
                ticket_for(pair.address, LAYERS), whole(LAYERS), deadline_s=30, on_range=ranges
            )
        )
        for layer in range(3):
            write_layer(pair, LAYERS, data, layer)
        await until(lambda: ranges.end == 3 * LAYER_BYTES)
        pair.sender.release("t")
        with pytest.raises(KvTransferFailed) as caught:
            await pull
        assert caught.value.reason == "KV_REFUSED_TICKET_CLOSED"
        assert pair.sender_events == [AgentTicketClosed("t", "released")]
        assert pair.receiver_events == [AgentLandingFreed(0)]


@pytest.mark.fault("F24", "F27")
@pytest.mark.parametrize("end", ["deadline", "cancel"])
async def test_giving_up_on_a_late_prefill_keeps_the_connection_for_other_pulls(
    transport: MakeTransport, end: str
) -> None:
    async with kv_pair(transport) as pair:
        data = open_ticket(pair, LAYERS, LAYER_BYTES)
        await pair.receiver.connect(pair.address)
        deadline_s = 3.0 if end == "deadline" else 60
        ticket = ticket_for(pair.address, LAYERS)
        pull = asyncio.create_task(pair.receiver.pull(ticket, whole(LAYERS), deadline_s=deadline_s))
        write_layer(pair, LAYERS, data, 0)
        await until(lambda: pair.receiver.stats().bytes_received == LAYER_BYTES)
        if end == "cancel":
            pull.cancel()
        with pytest.raises((KvTransferFailed, asyncio.CancelledError)):
            await pull
        await until(lambda: pair.receiver_events == [AgentLandingFreed(0)])
        for layer in range(1, LAYERS.num_layers):
            write_layer(pair, LAYERS, data, layer)
        await pair.receiver.pull(ticket, whole(LAYERS), deadline_s=30)
        assert pair.sender_transport.num_connections == 1  # type: ignore[attr-defined]
        assert pair.sender.stats().num_peers == 1


class LateParts(AgentHooks):
    """Simulates a slow link. Each part waits 0.2 s before it is announced."""

    def __init__(self) -> None:
        self.num_late = 0

    def part_delay_s(self, pull_id: int, offset: int) -> float:
        self.num_late += 1
        return 0.2


@pytest.mark.fault("F24", "F27")
@pytest.mark.parametrize("end", ["cancel", "release", "both", "fetch"])
async def test_a_pull_that_ends_while_parts_are_late_does_not_harm_another_pull(
    transport: MakeTransport, end: str
) -> None:
    """Two pulls from one source share a connection. No late part is announced after a refusal."""
    hooks, pool, targets = LateParts(), Pool(6, 3 << 20), Targets(3 << 20)
    size = LAYERS.total_bytes
    async with kv_pair(transport, sender_hooks=hooks, blocks=pool) as pair:
        await pair.receiver.connect(pair.address)

        def pull(ticket_id: str, landing: ArenaRange) -> asyncio.Task[object]:
            ticket = ticket_for(pair.address, LAYERS, ticket_id)
            return asyncio.create_task(pair.receiver.pull(ticket, landing, deadline_s=60))

        if end == "fetch":
            leaver: asyncio.Task[object] = asyncio.create_task(fetch(pair, targets))
        else:
            there = ArenaRange(size, size)
            pair.sender.open("t0", 1, there, LAYERS, 5.0, chunk_bytes=LAYER_BYTES)
            pair.sender.ready("t0", LAYERS.num_layers)
            leaver = pull("t0", there)
        await until(lambda: hooks.num_late > 0)
        data = open_ticket(pair, LAYERS, LAYER_BYTES)
        neighbour = pull("t", whole(LAYERS))
        if end in ("release", "both"):
            pair.sender.release("t0")
        if end != "release":
            leaver.cancel()
        await asyncio.wait([leaver])
        await until(lambda: pair.receiver.num_pulls == 1 or neighbour.done())
        for layer in range(LAYERS.num_layers):
            write_layer(pair, LAYERS, data, layer)
        # this pull's parts are also late, so all parts of the other pull have been due
        await neighbour
        assert (pair.landed(size) == data).all()
        assert pair.sender.stats().num_peers == 1
        is_fetch = end == "fetch"
        assert pair.receiver_events == ([] if is_fetch else [AgentLandingFreed(size)])
        assert targets.num_freed == is_fetch
        await until(lambda: not pool.pinned)


class DeafToTheFirst(AgentHooks):
    """The receiver drops the answer to the first pull, so it never takes this pull's payload."""

    def is_dropped(self, pull_id: int) -> bool:
        return pull_id == 1


@pytest.mark.fault("F24", "F27")
async def test_a_pull_that_is_never_drained_does_not_harm_another_pull(
    transport: MakeTransport,
) -> None:
    """The other pull completes on the old connection, and the next pull opens a new connection."""
    size = LAYERS.total_bytes
    first, third = ArenaRange(size, size), ArenaRange(2 * size, size)
    async with kv_pair(transport, hooks=DeafToTheFirst()) as pair:
        pair.stage(LAYERS, "t0", offset=size)
        pair.stage(LAYERS, "t2", offset=2 * size)
        leaver = asyncio.create_task(
            pair.receiver.pull(ticket_for(pair.address, LAYERS, "t0"), first, deadline_s=60)
        )
        await until(lambda: pair.sender.stats().num_sends == 1)
        data = open_ticket(pair, LAYERS, LAYER_BYTES)
        ranges = Ranges(size)
        neighbour = asyncio.create_task(
            pair.receiver.pull(
                ticket_for(pair.address, LAYERS), whole(LAYERS), deadline_s=60, on_range=ranges
            )
        )
        leaver.cancel()
        written = 0
        # this takes some seconds, in which parts of the other pull arrive
        while len(pair.receiver._pool):
            assert written < LAYERS.num_layers
            before = ranges.end
            write_layer(pair, LAYERS, data, written)
            written += 1
            await until(lambda end=before: ranges.end > end or neighbour.done())
            await asyncio.sleep(1.0)
        await pair.receiver.pull(ticket_for(pair.address, LAYERS, "t2"), third, deadline_s=60)
        assert pair.sender.stats().num_peers == 2
        for layer in range(written, LAYERS.num_layers):
            write_layer(pair, LAYERS, data, layer)
        await neighbour
        assert (pair.landed(size) == data).all()
        await until(lambda: pair.receiver_events == [AgentLandingFreed(size)])
        await until(lambda: pair.sender.stats().num_peers == 1)


class FlipInPart(AgentHooks):
    """Flips one bit of the n-th part that arrives."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_received(self, payload: ByteArray) -> None:
        self.number -= 1
        if self.number == 0:
            payload[payload.size // 3] ^= 4


@pytest.mark.fault("F34")
@pytest.mark.parametrize("number", [1, 4, 8])
async def test_a_flipped_bit_in_any_part_fails_the_pull_and_is_never_handed_on(
    transport: MakeTransport, number: int
) -> None:
    async with kv_pair(transport, hooks=FlipInPart(number)) as pair:
        data = open_ticket(pair, LAYERS, LAYER_BYTES)
        pair.sender.staging(whole(LAYERS))[:] = data
        pair.sender.ready("t", LAYERS.num_layers)
        ranges = Ranges(data.size)
        ticket = ticket_for(pair.address, LAYERS)
        with pytest.raises(KvTransferFailed) as caught:
            await pair.receiver.pull(ticket, whole(LAYERS), deadline_s=30, on_range=ranges)
        assert caught.value.reason == "KV_CORRUPT"
        assert ranges.end == (number - 1) * LAYER_BYTES
        assert pair.receiver.stats().num_corrupt == 1
        await until(lambda: pair.receiver_events == [AgentLandingFreed(0)])
        await pair.receiver.pull(ticket, whole(LAYERS), deadline_s=30)


# -- blocks of a pool -----------------------------------------------------------------------------

NAMES = [bytes([i]) * 16 for i in range(6)]


class Pool:
    """Holds the blocks of the first `num_held` names, with their checksums if `has_checksums`."""

    def __init__(self, num_held: int, block_bytes: int, has_checksums: bool = True) -> None:
        self.blocks = {name: pattern(block_bytes, i) for i, name in enumerate(NAMES[:num_held])}
        self.has_checksums = has_checksums
        self.pinned: list[PinnedBlocks] = []
        self.num_opened = 0

    def open(self, names: Sequence[bytes]) -> PinnedBlocks | None:
        views = []
        for name in names:
            if name not in self.blocks:
                break
            views.append(self.blocks[name])
        if not views:
            return None
        checksums = [xxhash.xxh3_128_digest(v.data) for v in views] if self.has_checksums else ()
        pinned = PinnedBlocks(views, checksums)
        self.pinned.append(pinned)
        self.num_opened += 1
        return pinned

    def close(self, pinned: PinnedBlocks) -> None:
        self.pinned.remove(pinned)


class Targets:
    def __init__(self, block_bytes: int) -> None:
        self.views = [np.zeros(block_bytes, np.uint8) for _ in NAMES]
        self.num_freed = 0

    def on_freed(self) -> None:
        self.num_freed += 1


async def fetch(pair: KvPair, targets: Targets, names: Sequence[bytes] = NAMES) -> int:
    checksums = await pair.receiver.fetch(
        pair.address,
        INCARNATION,
        names,
        targets.views,
        deadline_s=30,
        on_freed=targets.on_freed,
        source="prefill-0",
    )
    assert checksums == [checksum(view) for view in targets.views[: len(checksums)]]
    return len(checksums)


@pytest.mark.req("S76", "S77")
@pytest.mark.parametrize("block_bytes", [512, 3 << 20])
@pytest.mark.parametrize("num_held", [0, 1, 4, 6])
async def test_a_fetch_brings_the_first_blocks_that_the_pool_holds(
    transport: MakeTransport, block_bytes: int, num_held: int
) -> None:
    pool, targets = Pool(num_held, block_bytes, has_checksums=num_held != 4), Targets(block_bytes)
    async with kv_pair(transport, blocks=pool) as pair:
        assert await fetch(pair, targets) == num_held
        assert targets.num_freed == 1
        for i, name in enumerate(NAMES[:num_held]):
            assert (targets.views[i] == pool.blocks[name]).all()
        await until(lambda: not pool.pinned)
        assert pair.sender.num_tickets == 0
        assert pair.sender_events == [], "no ticket of an engine was closed"
        assert pair.receiver_events == []
        sent = pair.sender.stats().messages_sent["meta"]
        per_part = max(1, CHUNK_BYTES // block_bytes)
        assert sent <= max(1, -(-num_held // per_part)), "one META for each part"


@pytest.mark.fault("F34")
async def test_a_block_that_was_corrupted_in_the_pool_fails_the_fetch(
    transport: MakeTransport,
) -> None:
    """The checksum covers the bytes as they were stored, not as they are now."""
    pool, targets = RottenPool(4, 512), Targets(512)
    async with kv_pair(transport, blocks=pool) as pair:
        with pytest.raises(KvTransferFailed) as caught:
            await fetch(pair, targets)
        assert caught.value.reason == "KV_CORRUPT"
        assert targets.num_freed == 1
        await until(lambda: not pool.pinned)


class RottenPool(Pool):
    def open(self, names: Sequence[bytes]) -> PinnedBlocks | None:
        pinned = super().open(names)
        assert pinned is not None
        pinned.views[2][7] ^= 1
        return pinned


async def test_a_fetch_is_refused_without_a_pool_or_with_another_model(
    transport: MakeTransport,
) -> None:
    async with kv_pair(transport) as pair:
        targets = Targets(512)
        with pytest.raises(KvTransferFailed, match="UNKNOWN_TICKET"):
            await fetch(pair, targets)
        assert targets.num_freed == 1
    pool = Pool(4, 512)
    async with kv_pair(transport, blocks=pool, receiver_fingerprint="model-b") as pair:
        with pytest.raises(KvTransferFailed, match="WRONG_MODEL"):
            await fetch(pair, targets)
    assert pool.num_opened == 0


@pytest.mark.fault("F39")
async def test_a_peer_cannot_pull_the_blocks_that_another_peer_fetches() -> None:
    """Each fetch is served under a ticket, whose name another peer could guess by counting."""
    loop, asked = asyncio.get_running_loop(), asyncio.Event()

    class Slow(AgentHooks):
        def part_delay_s(self, pull_id: int, offset: int) -> float:
            asked.set()
            return 3600.0  # the blocks stay pinned for the fetch

    async with kv_pair(MemoryTransport, blocks=Pool(6, 512), sender_hooks=Slow()) as pair:
        fetching = loop.create_task(fetch(pair, Targets(512)))
        await asked.wait()
        (lent,) = pair.sender._sender._staged
        kind, peer, pull_id, *_ = lent.split("/")
        ticket = ticket_for(pair.address, SMALL, f"{kind}/{peer}/{pull_id}", attempt=0)
        with pytest.raises(KvTransferFailed, match="UNKNOWN_TICKET"):
            await pair.receiver.pull(ticket, whole(SMALL), deadline_s=30)
        assert kind == "fetch"
        fetching.cancel()
        await asyncio.wait([fetching])


async def test_a_fetch_into_targets_of_another_size_is_a_protocol_error(
    transport: MakeTransport,
) -> None:
    pool, targets = Pool(4, 512), Targets(256)
    async with kv_pair(transport, blocks=pool) as pair:
        with pytest.raises(KvTransferFailed) as caught:
            await fetch(pair, targets)
        assert caught.value.reason == "KV_PROTOCOL_ERROR"
        await until(lambda: targets.num_freed == 1)
        await until(lambda: not pool.pinned)


@pytest.mark.fault("F27")
async def test_a_cancelled_fetch_unpins_the_blocks_and_frees_its_targets_once(
    transport: MakeTransport,
) -> None:
    pool, targets = Pool(6, 3 << 20), Targets(3 << 20)
    async with kv_pair(transport, blocks=pool) as pair:
        await pair.receiver.connect(pair.address)
        task = asyncio.create_task(fetch(pair, targets))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: targets.num_freed == 1)
        await until(lambda: not pool.pinned)
        assert pair.sender.num_tickets == 0


async def test_a_fetch_of_many_small_blocks_splits_its_ranges_over_several_messages(
    transport: MakeTransport,
) -> None:
    names = [i.to_bytes(16, "big") for i in range(1024)]
    pool = Pool(0, 64)
    pool.blocks = {name: pattern(64, i) for i, name in enumerate(names)}
    targets = Targets(64)
    targets.views = [np.zeros(64, np.uint8) for _ in names]
    async with kv_pair(transport, blocks=pool) as pair:
        assert await fetch(pair, targets, names) == len(names)
        assert all((targets.views[i] == pool.blocks[n]).all() for i, n in enumerate(names))
        await until(lambda: not pool.pinned)
