"""A disk that does not answer (F33).

No request waits for the disk, only a bounded number of calls hang, and a process can still end.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pdmesh.core.kv.tier import Tier
from pdmesh.core.kv.tiers.disk_health import DiskState
from pdmesh.kv.tiers.file_store import FileStore
from pdmesh.kv.tiers.report import TierEvent
from pdmesh.kv.transport.base import ByteArray
from tests.fakes.kv.tiers import (
    OWNER,
    Rig,
    fill,
    names_of,
    rig,
)
from tests.support.waiting import PATIENCE_S, until

CHAIN = names_of(*range(1, 7))
HANG_S = 1.0


class HangingStore(FileStore):
    """A store on a file server that is gone. Calls return only when the server is back."""

    def __init__(self, answers: threading.Event, store: FileStore) -> None:
        self.__dict__ = store.__dict__
        self.answers = answers
        self.num_calls = 0

    def _call(self) -> None:
        self.num_calls += 1
        assert self.answers.wait(4 * PATIENCE_S)

    def contains(
        self, names: Sequence[bytes], owner: bytes, is_given_up: threading.Event | None = None
    ) -> int:
        self._call()
        return super().contains(names, owner, is_given_up)

    def get(self, name: bytes, owner: bytes, out: ByteArray) -> bytes | None:
        self._call()
        return super().get(name, owner, out)

    def put(
        self, name: bytes, owner: bytes, data: ByteArray, checksum: bytes, position: int = 0
    ) -> bool:
        self._call()
        return super().put(name, owner, data, checksum, position)


@asynccontextmanager
async def hanging(
    folder: Path, num_slots: int = 16
) -> AsyncIterator[tuple[Rig, HangingStore, threading.Event]]:
    """A file tier that contains `CHAIN`. Its disk hangs until the event is set."""
    r = rig(folder, num_slots=num_slots, lookup_s=0.05)
    fill(r.pool, CHAIN)
    r.stack.stored(CHAIN)
    assert await asyncio.to_thread(r.files.flush, 10)
    r.pool.clear()
    r.stack.report()
    answers = threading.Event()
    store = HangingStore(answers, r.store)
    r.files._store = store
    try:
        yield r, store, answers
    finally:
        answers.set()
        await until(lambda: not r.files.num_waiting and not r.stack.num_loading)
        await r.stack.close()
    assert r.pool.num_pinned == 0, "everything was given back"
    r.pool.check_invariants()


@pytest.mark.fault("F33")
@pytest.mark.req("S106")
async def test_a_lookup_that_hangs_delays_no_request_and_turns_the_tier_off(tmp_path: Path) -> None:
    async with hanging(tmp_path) as (r, store, answers):
        for _ in range(20):
            lease = await asyncio.wait_for(r.stack.fetch(CHAIN, OWNER, 0, 0.2), PATIENCE_S)
            assert lease.blocks == []
        assert store.num_calls <= 4, "the other lookups were given up before they began"
        r.clock.skipped_s += HANG_S
        assert [f.reason for f in r.stack.report().faults] == ["KV_TIER_OFF"]
        num_calls = store.num_calls
        r.clock.skipped_s += 600.0
        (await r.stack.fetch(CHAIN, OWNER, 0, 0.2)).close()
        assert store.num_calls == num_calls, "no probe during a hang: the probe would hang, too"

        answers.set()
        r.stack._lookup_s = 30.0
        await until(lambda: r.stack.report() and r.files.state is DiskState.OK)
        lease = await r.stack.fetch(CHAIN, OWNER, 0, 60.0)
        assert lease.tiers == [Tier.FILE] * 6
        lease.close()


@pytest.mark.fault("F33")
async def test_loads_that_hang_are_bounded_by_the_threads_they_hold(tmp_path: Path) -> None:
    async with hanging(tmp_path) as (r, store, answers):
        store.contains = r.store.contains  # type: ignore[method-assign]  # lookups do not hang
        (await asyncio.wait_for(r.stack.fetch(CHAIN, OWNER, 0, 0.2), PATIENCE_S)).close()
        await until(lambda: store.num_calls == 4)  # one call in each thread
        assert r.stack.num_loading == 6
        r.clock.skipped_s += HANG_S
        r.stack.report()
        assert r.files.state is DiskState.OFF
        await until(lambda: r.stack.num_loading == 4)
        assert r.counts.total(Tier.FILE, TierEvent.FAILED) == 2, (
            "the loads that waited for a thread failed"
        )
        answers.set()
        await until(lambda: r.pool.num_blocks == 4)


@pytest.mark.fault("F33")
async def test_a_write_that_hangs_makes_the_tier_read_only_and_frees_the_waiting_blocks(
    tmp_path: Path,
) -> None:
    more = names_of(*range(10, 22))
    async with hanging(tmp_path) as (r, store, answers):
        fill(r.pool, more)
        r.stack.stored(more)
        await until(lambda: store.num_calls == 1)
        assert r.pool.num_pinned == len(more)
        r.clock.skipped_s += HANG_S
        assert [f.reason for f in r.stack.report().faults] == ["KV_TIER_READ_ONLY"]
        assert r.pool.num_pinned == 1, "the hanging write may still read one block"
        assert r.counts.total(Tier.FILE, TierEvent.DROPPED) == len(more) - 1
        r.stack.stored(more)
        assert r.pool.num_pinned == 1
        answers.set()
        await until(lambda: r.stack.report() and r.files.state is DiskState.OK)


@pytest.mark.fault("F33")
async def test_a_bug_in_the_store_costs_one_block_and_not_the_writer(tmp_path: Path) -> None:
    class Buggy(HangingStore):
        def put(self, *args: Any) -> bool:
            if args[0] == CHAIN[0]:
                raise ValueError("a bug")
            return super().put(*args)

    async with hanging(tmp_path / "a") as (r, _, answers):
        answers.set()
        for path in (tmp_path / "a").rglob("*.kv"):
            path.unlink()
        r.files._store = Buggy(answers, r.store)
        fill(r.pool, CHAIN)
        r.stack.stored(CHAIN)
        await until(lambda: not r.files.num_waiting)
        assert r.counts.total(Tier.FILE, TierEvent.FAILED) == 1
        assert r.store.contains(CHAIN[1:], OWNER) == 0b11111


@pytest.mark.fault("F33")
async def test_slow_work_with_progress_does_not_count_as_hung(tmp_path: Path) -> None:
    """Counting the files of a large directory may take longer than the time after which a call
    counts as hanging.
    """
    r = rig(tmp_path)
    steps = threading.Semaphore(0)
    has_begun = threading.Event()

    def slow() -> int:
        for _ in range(3):
            has_begun.set()
            assert steps.acquire(timeout=60)
            r.store.on_step()
        return 0

    r.store.recover = slow  # type: ignore[method-assign]
    fill(r.pool, CHAIN[:1])
    r.stack.stored(CHAIN[:1])
    for _ in range(3):
        assert await asyncio.to_thread(has_begun.wait, 20)
        has_begun.clear()
        r.clock.skipped_s += 0.9 * HANG_S
        r.stack.report()
        assert r.files.state is DiskState.OK
        steps.release()
    await r.stack.close()


@pytest.mark.fault("F33")
def test_a_process_ends_while_its_disk_hangs(tmp_path: Path) -> None:
    """The block's file is a pipe without a writer. Opening the pipe takes forever, as with a file
    server that is gone.
    """
    script = textwrap.dedent(
        f"""
        import asyncio, os
        from pathlib import Path
        from tests.fakes.kv.tiers import OWNER, names_of, rig

        async def main():
            r = rig(Path({str(tmp_path)!r}))
            (name,) = names_of(1)
            path = r.store._path(name, OWNER)
            path.parent.mkdir(parents=True)
            os.mkfifo(path)
            lease = await r.stack.fetch([name], OWNER, 0, 0.1)
            assert lease.blocks == []
            assert r.stack.num_loading == 1
            await r.stack.close()

        asyncio.run(main())
        print("closed", flush=True)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b"closed\n"
