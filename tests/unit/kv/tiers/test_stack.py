"""The tiers together: host pool, peers' pools and files.

A block in any tier is served as a whole and in bounded time, or not served.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdmesh.core.kv.prefix.pins import PinnedPrefix
from pdmesh.core.kv.tier import Tier
from pdmesh.core.kv.tiers import prefetch as prefetch_bounds
from pdmesh.core.kv.tiers.disk_health import DiskState
from pdmesh.kv.tiers.loads import FAILED_S
from pdmesh.kv.tiers.peers import PeerHolding
from pdmesh.kv.tiers.report import TierEvent
from pdmesh.kv.tiers.stack import BlockLease
from tests.fakes.kv.tiers import (
    OWNER,
    FakePeer,
    Rig,
    data_of,
    fill,
    names_of,
    rig,
)
from tests.support.waiting import until

CHAIN = names_of(1, 2, 3, 4, 5, 6)


@asynccontextmanager
async def running(folder: Path, **options: Any) -> AsyncIterator[Rig]:
    made = rig(folder, **options)
    yield made
    await made.stack.close()
    made.pool.check_invariants()
    assert made.pool.num_pinned == 0, "everything was given back"
    assert made.stack.num_loading == 0


async def written(r: Rig, names: list[bytes]) -> None:
    """Write the blocks to the file store and remove them from the pool."""
    fill(r.pool, names)
    r.stack.stored(names)
    assert await asyncio.to_thread(r.files.flush, 60)
    r.pool.clear()
    assert r.pool.num_blocks == 0


def check(lease: BlockLease, names: list[bytes], tiers: list[Tier]) -> None:
    """Check that `lease` has these blocks from these tiers, with the right bytes."""
    assert lease.tiers == tiers
    used = lease.use(lease.first, len(names))
    assert [block.name for block in used] == names
    assert all(np.array_equal(block.data, data_of(block.name)) for block in used)


@pytest.mark.req("S76", "S77")
async def test_the_host_pool_serves_what_it_holds(tmp_path: Path) -> None:
    async with running(tmp_path) as r:
        fill(r.pool, CHAIN[:4])
        r.pool.forget(CHAIN[0])
        lease = await r.stack.fetch(CHAIN, OWNER, 1, 1.0)
        check(lease, CHAIN[1:4], [Tier.HOST] * 3)
        assert r.counts.total(Tier.HOST, TierEvent.SERVED) == 3
        lease.close()
        lease.close()


@pytest.mark.req("S77")
async def test_a_lease_covers_what_the_engine_may_have_evicted_meanwhile(tmp_path: Path) -> None:
    """The engine has reported that it holds three blocks, but may have evicted them since. If the
    pool has them, the `BlockLease` contains these blocks as well, at no cost.
    """
    async with running(tmp_path) as r:
        await written(r, CHAIN)
        fill(r.pool, CHAIN[1:3])
        lease = await r.stack.fetch(CHAIN, OWNER, 3, 5.0)
        assert lease.first == 1
        check(lease, CHAIN[1:], [Tier.HOST] * 2 + [Tier.FILE] * 3)
        lease.close()


@pytest.mark.req("S76", "S77", "S105")
async def test_the_file_store_serves_and_promotes_to_the_pool(tmp_path: Path) -> None:
    async with running(tmp_path) as r:
        await written(r, CHAIN)
        lease = await r.stack.fetch(CHAIN, OWNER, 0, 5.0)
        check(lease, CHAIN, [Tier.FILE] * 6)
        lease.close()
        assert r.counts.total(Tier.FILE, TierEvent.SERVED) == 6
        again = await r.stack.fetch(CHAIN, OWNER, 0, 5.0)
        check(again, CHAIN, [Tier.HOST] * 6)
        again.close()
        assert r.store.num_read == 6, "the block was promoted, so memory serves it the second time"


@pytest.mark.req("S78", "S105")
async def test_a_pinned_block_has_a_file_that_lives_as_long_as_the_pin(tmp_path: Path) -> None:
    """The block may be stored before or after the pin. When the pin ends, the file is kept no
    longer than others.
    """

    def until_of(r: Rig, name: bytes) -> float:
        (found,) = [stored for stored in r.store.scan() if stored.name == name]
        return found.used_at

    async with running(tmp_path) as r:
        end = time.time() + 3600
        fill(r.pool, CHAIN[:2])
        r.stack.stored(CHAIN[:1])
        r.stack.pin([PinnedPrefix(tuple(CHAIN[:2]), OWNER, end)])
        r.stack.stored(CHAIN[1:2])
        assert await asyncio.to_thread(r.files.flush, 60)
        assert [until_of(r, name) for name in CHAIN[:2]] == pytest.approx([end, end])
        assert r.stack.report().num_pinned == 2
        r.stack.pin([])
        assert await asyncio.to_thread(r.files.flush, 60)
        assert all(until_of(r, name) < end - 3000 for name in CHAIN[:2])
        assert r.stack.report().num_pinned == 0
        assert r.stack.report().num_pinned is None, "nothing is pinned by now"


@pytest.mark.req("S68", "S105")
async def test_a_restarted_instance_starts_with_the_file_stores_blocks(tmp_path: Path) -> None:
    async with running(tmp_path) as before:
        await written(before, CHAIN)
    async with running(tmp_path) as after:
        lease = await after.stack.fetch(CHAIN, OWNER, 0, 5.0)
        check(lease, CHAIN, [Tier.FILE] * 6)
        lease.close()


@pytest.mark.req("S76")
async def test_a_peer_serves_and_promotes_to_the_pool(tmp_path: Path) -> None:
    peer = FakePeer(CHAIN)
    async with running(tmp_path, peers=peer) as r:
        lease = await r.stack.fetch(CHAIN, OWNER, 0, 5.0, peer.find)
        check(lease, CHAIN, [Tier.PEER] * 6)
        lease.close()
        assert peer.num_asked == 1, "one message for a run of blocks"
        assert r.pool.num_blocks == 6


def held_by(num_blocks: int = len(CHAIN)) -> PeerHolding:
    return PeerHolding("decode-1", 1, ("nowhere",), 0, num_blocks)


async def finds_nothing(names: Sequence[bytes], first: int) -> Sequence[PeerHolding]:
    """The index does not know the blocks of a chat that has just ended."""
    return ()


def prefetch(r: Rig, names: list[bytes] = CHAIN, chance: float = 0.5, timeout_s: float = 9) -> None:
    r.stack.prefetch(names, OWNER, held_by(len(names)), chance, timeout_s)


async def test_blocks_that_were_prefetched_need_no_peer_when_a_prompt_comes(tmp_path: Path) -> None:
    peer = FakePeer(CHAIN)
    async with running(tmp_path, num_slots=64, peers=peer) as r:
        fill(r.pool, CHAIN[:2])
        prefetch(r)
        assert r.counts.total(Tier.PEER, TierEvent.PREFETCHED) == 4
        await until(lambda: not r.stack.num_loading)
        lease = await r.stack.fetch(CHAIN, OWNER, 0, 5.0, finds_nothing)
        check(lease, CHAIN, [Tier.HOST] * 6)
        lease.close()
        assert peer.num_asked == 1


async def test_a_prompt_joins_a_prefetch_under_way(tmp_path: Path) -> None:
    peer = FakePeer(CHAIN, delay_s=0.1)
    async with running(tmp_path, num_slots=64, peers=peer) as r:
        prefetch(r)
        prefetch(r)  # two choices of a call gave the same answer
        assert r.counts.total(Tier.PEER, TierEvent.PREFETCHED) == 6
        lease = await r.stack.fetch(CHAIN, OWNER, 0, 60.0, finds_nothing)
        check(lease, CHAIN, [Tier.PEER] * 6)
        lease.close()
        assert peer.num_asked == 1


async def test_a_prompt_is_served_by_a_prefetch_that_ends_during_its_look(tmp_path: Path) -> None:
    async with running(tmp_path, num_slots=64, peers=FakePeer(CHAIN)) as r:

        async def find(names: Sequence[bytes], first: int) -> Sequence[PeerHolding]:
            prefetch(r)
            await until(lambda: not r.stack.num_loading)
            return ()

        lease = await r.stack.fetch(CHAIN, OWNER, 0, 60.0, find)
        check(lease, CHAIN, [Tier.HOST] * 6)
        lease.close()


@pytest.mark.parametrize(("chance", "recompute_s"), [(0.0, 10.0), (0.5, 0.0015), (1.0, 0.0009)])
async def test_nothing_is_prefetched_that_saves_no_time(
    tmp_path: Path, chance: float, recompute_s: float
) -> None:
    """In this test, a load takes 1 ms per block."""
    async with running(tmp_path, num_slots=64, peers=FakePeer(CHAIN)) as r:
        r.stack.costs.recompute_block_s = recompute_s
        prefetch(r, chance=chance)
        assert r.stack.num_loading == 0
        r.stack.costs.recompute_block_s = 1.0
        prefetch(r)
        assert r.stack.num_loading == len(CHAIN)


@pytest.mark.parametrize(
    ("num_slots", "most", "timeout_s"), [(64, 4, 9.0), (32, 256, 9.0), (64, 256, 0.0085)]
)
async def test_of_too_many_blocks_the_first_are_prefetched(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_slots: int,
    most: int,
    timeout_s: float,
) -> None:
    """The blocks exceed the number of loads, the size of the pool, or the time."""
    monkeypatch.setattr(prefetch_bounds, "MAX_PREFETCHING", most)
    async with running(tmp_path, num_slots=num_slots, peers=FakePeer(CHAIN)) as r:
        prefetch(r, timeout_s=timeout_s)
        assert r.stack.num_loading == 4
        assert r.counts.total(Tier.PEER, TierEvent.DROPPED) == 2
        await until(lambda: not r.stack.num_loading)
        assert r.pool.held(CHAIN) == 0b1111


async def test_from_a_peer_whose_loads_fail_nothing_is_prefetched_for_a_time(
    tmp_path: Path,
) -> None:
    peer = FakePeer(CHAIN, has_lost={CHAIN[0]})
    async with running(tmp_path, num_slots=64, peers=peer) as r:
        prefetch(r)
        await until(lambda: not r.stack.num_loading)
        peer.has_lost.clear()
        prefetch(r)
        assert r.stack.num_loading == 0
        r.clock.skipped_s += FAILED_S
        prefetch(r)
        await until(lambda: r.pool.held(CHAIN) == 0b111111)


async def test_without_peers_nothing_is_prefetched(tmp_path: Path) -> None:
    async with running(tmp_path) as r:
        prefetch(r)
        assert r.stack.num_loading == 0


@pytest.mark.req("S76", "S106")
async def test_each_block_comes_from_the_fastest_tier_that_has_it(tmp_path: Path) -> None:
    peer = FakePeer(CHAIN[1:4])
    async with running(tmp_path, peers=peer) as r:
        await written(r, CHAIN)
        fill(r.pool, CHAIN[:2])
        r.stack.costs.loaded(Tier.FILE, 1, 5.0)  # the file tier has recently been slow
        lease = await r.stack.fetch(CHAIN, OWNER, 0, 5.0, peer.find)
        check(lease, CHAIN, [Tier.HOST] * 2 + [Tier.PEER] * 2 + [Tier.FILE] * 2)
        lease.close()


@pytest.mark.req("S106")
async def test_the_tiers_are_asked_at_the_same_time(tmp_path: Path) -> None:
    """Each tier answers only when the other one has been asked, too."""
    peer = FakePeer(CHAIN[:2])
    both = threading.Barrier(2)
    async with running(tmp_path, peers=peer) as r:
        await written(r, CHAIN)
        r.store.on_lookup = lambda: both.wait(30)

        async def find(names: Sequence[bytes], first: int) -> Sequence[PeerHolding]:
            await asyncio.to_thread(both.wait, 30)
            return await peer.find(names, first)

        found, holdings = await r.stack._look(CHAIN, 0, OWNER, 60.0, find)
        assert found == 0b111111
        assert holdings[0].held == 0b11


@pytest.mark.req("S77", "S106")
@pytest.mark.parametrize("what", ["on_lookup", "on_read"])
async def test_a_slow_tier_delays_a_request_by_a_bounded_time(tmp_path: Path, what: str) -> None:
    async with running(tmp_path) as r:
        await written(r, CHAIN)
        fill(r.pool, CHAIN[:2])
        answers = threading.Event()
        setattr(r.store, what, lambda: answers.wait(60))
        async with asyncio.timeout(30):
            lease = await r.stack.fetch(CHAIN, OWNER, 0, 0.1)
        check(lease, CHAIN[:2], [Tier.HOST] * 2)
        lease.close()
        if what == "on_read":
            assert r.counts.total(Tier.FILE, TierEvent.LATE) > 0
        answers.set()


@pytest.mark.req("S77")
async def test_no_request_waits_longer_than_computing_takes(tmp_path: Path) -> None:
    async with running(tmp_path) as r:
        await written(r, CHAIN)
        answers = threading.Event()
        r.store.on_read = lambda: answers.wait(120)
        r.stack.costs.recompute_block_s = 0.01
        async with asyncio.timeout(30):
            lease = await r.stack.fetch(CHAIN, OWNER, 0, 90.0)
        assert lease.blocks == []
        lease.close()
        answers.set()


async def test_a_late_load_serves_the_next_request(tmp_path: Path) -> None:
    async with running(tmp_path) as r:
        await written(r, CHAIN[:2])
        r.store.read_s = 0.2
        (await r.stack.fetch(CHAIN[:2], OWNER, 0, 0.05)).close()
        await until(lambda: not r.stack.num_loading)
        assert r.pool.held(CHAIN[:2]) == 0b11


async def test_two_requests_share_one_load(tmp_path: Path) -> None:
    async with running(tmp_path) as r:
        await written(r, CHAIN)
        r.store.read_s = 0.02
        leases = await asyncio.gather(
            *(r.stack.fetch(CHAIN, OWNER, 0, 5.0) for _ in range(5)),
        )
        for lease in leases:
            check(lease, CHAIN, [Tier.FILE] * 6)
            lease.close()
        assert r.store.num_read == 6


@pytest.mark.req("S77")
async def test_a_request_that_is_cancelled_unpins_its_blocks(tmp_path: Path) -> None:
    peer = FakePeer(CHAIN[:2], delay_s=0.1)
    async with running(tmp_path, peers=peer) as r:
        await written(r, CHAIN)
        fill(r.pool, CHAIN[2:3])
        r.store.read_s = 0.1
        for wait_s in (0.0, 0.001, 0.02, 0.05):
            task = asyncio.create_task(r.stack.fetch(CHAIN, OWNER, 0, 5.0, peer.find))
            await asyncio.sleep(wait_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_a_prompt_longer_than_the_pool_is_served_as_far_as_it_fits(tmp_path: Path) -> None:
    async with running(tmp_path, num_slots=4) as r:
        for part in (CHAIN[:3], CHAIN[3:]):
            await written(r, part)
        lease = await r.stack.fetch(CHAIN, OWNER, 0, 5.0)
        check(lease, CHAIN[:4], [Tier.FILE] * 4)
        lease.close()


@pytest.mark.fault("F34")
async def test_a_flipped_bit_in_the_pool_is_found_and_the_block_forgotten(tmp_path: Path) -> None:
    async with running(tmp_path) as r:
        fill(r.pool, CHAIN)
        (block,) = r.pool.pin(CHAIN[2:3])
        block.data[17] ^= 1
        r.pool.unpin(CHAIN[2:3])
        lease = await r.stack.fetch(CHAIN, OWNER, 0, 1.0)
        check(lease, CHAIN[:2], [Tier.HOST] * 2)
        lease.close()
        assert r.counts.total(Tier.HOST, TierEvent.CORRUPT) == 1
        assert r.pool.held(CHAIN) == 0b111011


@pytest.mark.fault("F34")
async def test_a_corrupt_file_is_counted_and_what_follows_it_recomputed(tmp_path: Path) -> None:
    async with running(tmp_path) as r:
        await written(r, CHAIN)
        (path,) = tmp_path.rglob(f"{CHAIN[3].hex()}.kv")
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        lease = await r.stack.fetch(CHAIN, OWNER, 0, 5.0)
        check(lease, CHAIN[:3], [Tier.FILE] * 3)
        lease.close()
        assert r.counts.total(Tier.FILE, TierEvent.CORRUPT) == 1
        assert not path.exists()


@pytest.mark.fault("F2")
async def test_blocks_that_a_peer_has_lost_are_recomputed(tmp_path: Path) -> None:
    peer = FakePeer(CHAIN, has_lost={CHAIN[4]})
    async with running(tmp_path, peers=peer) as r:
        lease = await r.stack.fetch(CHAIN, OWNER, 0, 5.0, peer.find)
        check(lease, CHAIN[:4], [Tier.PEER] * 4)
        lease.close()
        assert r.counts.total(Tier.PEER, TierEvent.FAILED) == 2


@pytest.mark.req("S76")
@pytest.mark.fault("F33")
async def test_a_full_disk_stores_nothing_serves_its_blocks_and_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    def full(fd: int, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with running(tmp_path) as r:
        fill(r.pool, names_of(99))
        # This is the oldest block. It is evicted before the disk counts as full.
        r.stack.stored(names_of(99), 100)
        assert await asyncio.to_thread(r.files.flush, 60)
        await written(r, CHAIN[:2])
        fill(r.pool, CHAIN[2:])
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", full)
            r.stack.stored(CHAIN[2:4], 2)
            await until(lambda: r.files.state is DiskState.READ_ONLY and not r.files.num_waiting)
            faults = r.stack.report().faults
            assert [(f.tier, f.reason) for f in faults] == [(Tier.FILE, "KV_TIER_READ_ONLY")]
            lease = await r.stack.fetch(CHAIN, OWNER, 0, 5.0)
            check(lease, CHAIN, [Tier.FILE] * 2 + [Tier.HOST] * 4)
            lease.close()
        # otherwise an open read would count as hanging
        await until(lambda: not r.files._readers.num_open)
        r.clock.skipped_s += 1.0  # the interval between probes
        r.stack.stored(CHAIN[4:5], 4)
        await until(lambda: r.files.state is DiskState.OK)
        assert [f.reason for f in r.stack.report().faults] == ["KV_TIER_RECOVERED"]
        assert r.store.contains(CHAIN[4:5], OWNER) == 1


@pytest.mark.fault("F33")
async def test_an_unreadable_disk_is_not_used_until_it_is_tried_again(tmp_path: Path) -> None:
    async with running(tmp_path) as r:
        await written(r, CHAIN)
        r.store.is_broken = True
        lease = await r.stack.fetch(CHAIN, OWNER, 0, 5.0)
        assert lease.blocks == []
        await until(lambda: r.stack.num_loading == 0)
        assert r.files.state is DiskState.OFF
        assert [f.reason for f in r.stack.report().faults] == ["KV_TIER_OFF"]
        num_read = r.store.num_read
        assert (await r.stack.fetch(CHAIN, OWNER, 0, 5.0)).blocks == []
        assert r.store.num_read == num_read, "the disk was not even asked"
        r.store.is_broken = False
        r.clock.skipped_s += 60.0
        (await r.stack.fetch(CHAIN, OWNER, 0, 5.0)).close()
        assert r.files.state is DiskState.OK
        lease = await r.stack.fetch(CHAIN, OWNER, 0, 5.0)
        assert len(lease.blocks) == 6
        lease.close()


@pytest.mark.req("S78")
async def test_reports_are_increments_and_net_changes(tmp_path: Path) -> None:
    async with running(tmp_path, num_slots=2) as r:
        fill(r.pool, CHAIN[:2])
        r.stack.stored(CHAIN[:2])
        first = r.stack.report()
        assert first.stored == tuple(CHAIN[:2])
        assert first.counts["host", "stored"] == 2
        assert await asyncio.to_thread(r.files.flush, 60)
        fill(r.pool, CHAIN[2:3])
        second = r.stack.report()
        assert (second.stored, second.removed) == ((CHAIN[2],), (CHAIN[0],))
        assert second.counts["host", "evicted"] == 1
        assert second.bytes_used["host"] == 2 * r.pool.block_bytes


@pytest.mark.req("S96")
async def test_the_files_of_a_popular_prompt_are_kept_too(tmp_path: Path) -> None:
    """These files are read once, and then memory serves the blocks. By last use alone, these files
    would be evicted first.
    """
    async with running(tmp_path, num_slots=32) as r:
        fill(r.pool, CHAIN)
        r.stack.stored(CHAIN)
        assert await asyncio.to_thread(r.files.flush, 60)
        for _ in range(8):
            (await r.stack.fetch(CHAIN[:2], OWNER, 0, 1.0)).close()
        r.stack.report()
        in_an_hour = time.time() + 3600

        def kept() -> set[bytes]:
            return {f.name for f in r.store.scan() if f.used_at > in_an_hour}

        await until(lambda: kept() == set(CHAIN[:2]))


@pytest.mark.req("S78")
@pytest.mark.parametrize("num_requests", [2000])
async def test_thousands_of_requests_with_random_aborts_leave_nothing_pinned(
    tmp_path: Path, num_requests: int
) -> None:
    """Prompts share prefixes, and the pool has room for a tenth of the blocks. A third of the
    requests is aborted.
    """
    rng = random.Random(5)
    prompts = [names_of(*(100 * family + n for n in range(12))) for family in range(12)]
    peer = FakePeer(prompts[0] + prompts[1][:5])
    num_served = 0

    async def one(r: Rig) -> None:
        nonlocal num_served
        chain = rng.choice(prompts)[: rng.randint(1, 12)]
        task = asyncio.create_task(
            r.stack.fetch(chain, OWNER, 0, rng.choice((0.0, 5.0)), peer.find)
        )
        if rng.random() < 1 / 3:
            for _ in range(rng.randint(0, 6)):
                await asyncio.sleep(0)
            task.cancel()
        try:
            lease = await task
        except asyncio.CancelledError:
            return
        num_served += len(lease.use(0, len(lease.blocks)))
        for name in chain[len(lease.blocks) :]:
            if r.pool.put(name, OWNER, lambda out, name=name: np.copyto(out, data_of(name))):  # type: ignore[misc]
                r.stack.stored([name])
        lease.close()

    async with running(tmp_path, num_slots=14, peers=peer) as r:
        for _ in range(num_requests // 8):
            await asyncio.gather(*(one(r) for _ in range(8)))
        assert num_served > num_requests
        await until(lambda: r.stack.num_loading == 0 and not r.files.num_waiting)


async def test_a_cancelled_lookup_of_peers_cancels_nothing_else(tmp_path: Path) -> None:
    """A lookup is cancelled if its channel to the index is closed. If that cancelled the fetch as
    well, the request would be lost.
    """

    async def find(*_: object) -> Any:
        raise asyncio.CancelledError

    async with running(tmp_path, peers=FakePeer(CHAIN)) as r:
        fill(r.pool, CHAIN[:1])
        lease = await r.stack.fetch(CHAIN, OWNER, 0, 1.0, find)
        assert lease.end == 1
        lease.close()
