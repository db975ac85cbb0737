"""The pool of KV blocks in host memory, used by several threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from pdmesh.core.instance.arena import ArenaRange
from pdmesh.kv.tiers.host_pool import HostPool, PinnedBlock, is_intact
from pdmesh.kv.tiers.pool_memory import PopulatedArena
from pdmesh.kv.transport.base import ByteArray
from tests.fakes.kv.tiers import (
    BLOCK_BYTES,
    OWNER,
    SLOT_BYTES,
    data_of,
    fill,
    name_of,
    names_of,
)


def test_touching_pages_does_not_change_them() -> None:
    arena = PopulatedArena(32 << 20)
    everything = arena.view(ArenaRange(0, 32 << 20))
    assert not everything[::4096].any()
    everything[:] = 7
    for thread in threading.enumerate():
        if thread.name == "kv-pool-pages":
            thread.join(60)
    assert (everything == 7).all()
    arena.close()


def test_a_block_whose_write_failed_is_not_in_the_pool() -> None:
    pool = HostPool(2 * SLOT_BYTES, BLOCK_BYTES)

    def write(_: object) -> None:
        raise RuntimeError("the engine's blocks are gone")

    with pytest.raises(RuntimeError):
        pool.put(name_of(1), OWNER, write)
    assert pool.held(names_of(1)) == 0
    fill(pool, names_of(1, 2))
    assert pool.held(names_of(1, 2)) == 0b11
    pool.check_invariants()


def put_some(pool: HostPool, is_over: threading.Event, seed: int) -> None:
    rng = np.random.default_rng(seed)
    while not is_over.is_set():
        name = name_of(int(rng.integers(16)))

        def write(out: ByteArray, name: bytes = name) -> None:
            out[:] = data_of(name)

        pool.put(name, OWNER, write)


def is_right(block: PinnedBlock) -> bool:
    return is_intact(block) and np.array_equal(block.data, data_of(block.name))


def read_some(pool: HostPool, wrong: list[str], seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(2000):
        pinned = pool.pin([name_of(int(rng.integers(16)))])
        wrong += [b.name.hex() for b in pinned if not is_right(b)]
        pool.unpin([block.name for block in pinned])


@pytest.mark.req("S78")
def test_readers_and_writers_of_several_threads_never_see_a_changed_block() -> None:
    """Sixteen blocks share four slots, so blocks are evicted all the time. A block that a reader
    has pinned must keep its bytes.
    """
    pool, wrong, is_over = HostPool(4 * SLOT_BYTES, BLOCK_BYTES), list[str](), threading.Event()
    writers = [threading.Thread(target=put_some, args=(pool, is_over, n)) for n in range(2)]
    readers = [threading.Thread(target=read_some, args=(pool, wrong, 9 + n)) for n in range(2)]
    for thread in (*writers, *readers):
        thread.start()
    for thread in readers:
        thread.join(60)
    is_over.set()
    for thread in writers:
        thread.join(60)
    assert wrong == []
    pool.check_invariants()
    assert pool.num_pinned == 0
