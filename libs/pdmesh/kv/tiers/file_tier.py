"""Reads and writes the file store on a few threads, so that no event loop and no engine waits.

Only a bounded number of blocks may wait to be read or written. Further blocks are dropped and
counted. After the disk fails or hangs, the tier does not use it for a while and then tries again
(`core.kv.tiers.disk_health`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, TypeVar

import structlog

from pdmesh.core.kv.tier import Tier
from pdmesh.core.kv.tiers.disk_health import DiskHealth, DiskState
from pdmesh.kv.tiers.disk_threads import DiskThreads, NotTried
from pdmesh.kv.tiers.file_format import BadBlockFile
from pdmesh.kv.tiers.file_store import FileStore
from pdmesh.kv.tiers.host_pool import HostPool, PinnedBlock
from pdmesh.kv.tiers.report import TierCounts, TierEvent, TierFault
from pdmesh.kv.transport.base import ByteArray

T = TypeVar("T")
log = structlog.get_logger(__name__)

_REASONS: Final = {
    DiskState.OK: "KV_TIER_RECOVERED",
    DiskState.READ_ONLY: "KV_TIER_READ_ONLY",
    DiskState.OFF: "KV_TIER_OFF",
}
_NUM_READERS: Final = 4
_MAX_WRITES: Final = 256  # writes that wait for the thread
_MAX_READS: Final = 1024  # reads that wait for a thread


class FileTier:
    """The file store as a tier. Call the coroutines on one loop, other methods on any thread."""

    def __init__(
        self,
        store: FileStore,
        pool: HostPool,
        counts: TierCounts,
        clock: Callable[[], float],
    ) -> None:
        self._store, self._pool, self._counts, self._clock = store, pool, counts, clock
        self._health = DiskHealth()
        self._health_lock = threading.Lock()
        self._readers = DiskThreads("kv-file-read", _NUM_READERS, _MAX_READS, clock)
        # Blocks that wait to be written are pinned. A slow disk must not pin the whole pool.
        max_waiting = min(_MAX_WRITES, pool.num_slots - pool.num_slots // 4)
        self._writer = DiskThreads("kv-file-write", 1, max_waiting, clock)
        store.on_step = self._got_on

    @property
    def state(self) -> DiskState:
        return self._health.state

    @property
    def bytes_used(self) -> int:
        return self._store.bytes_used

    @property
    def num_blocks_at_most(self) -> int:
        return self._store.num_blocks_at_most

    @property
    def num_waiting(self) -> int:
        """The number of writes that wait or run."""
        return self._writer.num_open

    def watch(self) -> None:
        """Look for a disk call that hangs, and drop all calls that wait behind it.

        Call this often. It is cheap.
        """
        reading, writing = self._readers.waits_since(), self._writer.waits_since()
        with self._health_lock:
            is_news = self._health.watch(reading, writing, self._clock())
            hangs_reading = self._health.is_read_hanging
            hangs_writing = self._health.is_write_hanging
        if is_news:
            self._tell(f"no answer for {self._health.hang_s:g} s")
        if hangs_reading:
            self._readers.drop_waiting()
        if hangs_writing:
            self._writer.drop_waiting()

    # -- reading ----------------------------------------------------------------------------------

    async def contains(self, names: Sequence[bytes], owner: bytes) -> int:
        """A mask of the positions in `names` whose blocks have files (`FileStore.contains`).

        Returns 0 while the disk is off or fails. A cancellation ends the look-up.
        """
        is_given_up = threading.Event()
        try:
            found = await self._read(lambda: self._store.contains(names, owner, is_given_up))
        finally:
            is_given_up.set()
        return found or 0

    async def get(self, name: bytes, owner: bytes, out: ByteArray) -> bytes | None:
        """Read the block into `out`, verify it, and return its checksum.

        Returns None if there is no file, if the file was bad, or if the disk failed or is not used
        now. A bad file is removed. Do not cancel this: the thread continues to write to `out` after
        a cancellation.
        """
        try:
            checksum = await self._read(lambda: self._store.get(name, owner, out))
        except BadBlockFile as error:
            log.warning("kv.tier.corrupt", tier=Tier.FILE.value, block=name.hex(), cause=str(error))
            self._counts.add(Tier.FILE, TierEvent.CORRUPT)
            return None
        if checksum is None:
            self._counts.add(Tier.FILE, TierEvent.FAILED)
        return checksum

    async def _read(self, work: Callable[[], T]) -> T | None:
        self.watch()
        with self._health_lock:
            may_read = self._health.may_read(self._clock())
        if not may_read:
            return None
        try:
            return await asyncio.wrap_future(self._readers.submit(lambda: self._judged(work)))
        except OSError:  # reported to `_health` already, or the read was not tried
            return None

    def _judged(self, work: Callable[[], T]) -> T:
        """Run a read on a disk thread and report the outcome to `_health`.

        The outcome is reported even if no load waits for the read any more.
        """
        try:
            result = work()
        except OSError as error:
            self._read_ended(error)
            raise
        except BadBlockFile:
            self._read_ended(None)
            raise
        self._read_ended(None)
        return result

    def _read_ended(self, error: OSError | None) -> None:
        with self._health_lock:
            is_news = self._health.read(error is None, self._clock())
        if is_news:
            self._tell(_cause(error))

    # -- writing ----------------------------------------------------------------------------------

    def write(self, names: Sequence[bytes], first: int = 0) -> None:
        """Store these blocks of the pool in the background.

        `first` is the position of the first block in its prompt.
        """
        self.watch()
        for position, name in enumerate(names, first):
            pinned = self._pool.pin([name]) if self._takes_writes() else []
            if not pinned:
                self._counts.add(Tier.FILE, TierEvent.DROPPED)
                continue
            self._queue_write(pinned[0], position)

    def _queue_write(self, block: PinnedBlock, position: int) -> None:
        try:
            written = self._writer.submit(lambda: self._write(block, position))
        except NotTried:
            self._counts.add(Tier.FILE, TierEvent.DROPPED)
            self._pool.unpin([block.name], is_use=False)
            return
        written.add_done_callback(lambda done: self._written(block, done))

    def keep(self, names: Sequence[bytes], owners: Sequence[bytes], until: Sequence[float]) -> None:
        """Prevent the eviction of each block's file until the block's time in `until` (wall clock).

        This runs in the background. Blocks without a file are skipped.
        """

        def work() -> None:
            try:
                for name, owner, end in zip(names, owners, until, strict=True):
                    self._store.keep(name, owner, end)
            except OSError as error:  # a read-only disk evicts nothing
                log.info("kv.tier.not_kept", cause=error.strerror)

        try:
            self._writer.submit(work).add_done_callback(_log_bug)
        except NotTried:
            log.info("kv.tier.not_kept", cause="too many calls wait for the disk")

    def flush(self, timeout_s: float) -> bool:
        """Wait until no write waits or runs. Returns False after a timeout."""
        return self._writer.flush(timeout_s)

    def close(self, timeout_s: float = 2.0) -> None:
        """Finish the waiting writes, unless `timeout_s` passes or the disk hangs.

        Release the threads. Idempotent.
        """
        ends = time.monotonic() + timeout_s
        while not self._writer.flush(min(0.1, timeout_s)) and time.monotonic() < ends:
            self.watch()
            if self._health.is_write_hanging:
                break
        self._writer.close()
        self._readers.close()

    def _takes_writes(self) -> bool:
        return self._health.state is not DiskState.OFF and not self._health.is_write_hanging

    def _write(self, block: PinnedBlock, position: int) -> None:
        with self._health_lock:
            may_write = self._health.may_write(self._clock())
        if not may_write:
            raise NotTried
        evicted = self._store.num_evicted
        try:
            is_new = self._store.put(block.name, block.owner, block.data, block.checksum, position)
        except OSError as error:
            self._write_ended(error)
            raise
        finally:
            self._counts.add(Tier.FILE, TierEvent.EVICTED, self._store.num_evicted - evicted)
        # If the block exists already, `put` writes nothing. That shows only that the disk answers.
        if is_new or self._health.is_write_hanging:
            self._write_ended(None)
        if is_new:
            self._counts.add(Tier.FILE, TierEvent.STORED)

    def _written(self, block: PinnedBlock, done: Future[None]) -> None:
        self._pool.unpin([block.name], is_use=False)
        match done.exception():
            case None:
                pass
            case NotTried():
                self._counts.add(Tier.FILE, TierEvent.DROPPED)
            case _:
                self._counts.add(Tier.FILE, TierEvent.FAILED)
                _log_bug(done)

    def _write_ended(self, error: OSError | None) -> None:
        with self._health_lock:
            is_news = self._health.wrote(error is None, self._clock())
        if is_news:
            self._tell(_cause(error))

    # -- the disk ---------------------------------------------------------------------------------

    def _got_on(self) -> None:
        self._readers.got_on()
        self._writer.got_on()

    def _tell(self, cause: str) -> None:
        state = self._health.state
        log.warning("kv.tier.disk", state=state.value, cause=cause)
        self._counts.fault(TierFault(Tier.FILE, _REASONS[state], cause))


def _log_bug(done: Future[None]) -> None:
    error = done.exception()
    if error is not None and not isinstance(error, OSError):
        log.error("kv.tier.write_died", exc_info=error)


def _cause(error: OSError | None) -> str:
    return f"{error.__class__.__name__}: {error.strerror}" if error else "it works again"
