"""The file store behind a few threads: reads and writes never run on an event loop or an engine's thread.

Bounded on all sides: so many threads, so many blocks waiting to be written (more are dropped and counted). A disk that fails
is left alone for a while and tried again (`core.disk_health`); the tier then serves nothing or takes nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

import structlog

from pdmesh.core.disk_health import DiskHealth, DiskState
from pdmesh.core.tiers import Tier
from pdmesh.kv.tiers.file_format import BadBlockFile
from pdmesh.kv.tiers.file_store import FileStore
from pdmesh.kv.tiers.host_pool import HostPool, PinnedBlock
from pdmesh.kv.tiers.report import TierCounts, TierEvent, TierFault
from pdmesh.kv.transport import ByteArray

T = TypeVar("T")
log = structlog.get_logger(__name__)

_REASONS: Final = {
    DiskState.OK: "KV_TIER_RECOVERED",
    DiskState.READ_ONLY: "KV_TIER_READ_ONLY",
    DiskState.OFF: "KV_TIER_OFF",
}


@dataclass(frozen=True, slots=True)
class _Write:
    block: PinnedBlock
    position: int


class FileTier:
    """`write` may be called from any thread; what is awaited, on one loop."""

    def __init__(
        self,
        store: FileStore,
        pool: HostPool,
        counts: TierCounts,
        clock: Callable[[], float],
        *,
        num_readers: int = 4,
        max_waiting: int = 256,
    ) -> None:
        self._store, self._pool, self._counts, self._clock = store, pool, counts, clock
        self._health = DiskHealth()
        # What waits is pinned: a slow disk must not hold the whole pool.
        self._max_waiting = min(max_waiting, pool.num_slots - pool.num_slots // 4)
        self._readers = ThreadPoolExecutor(num_readers, thread_name_prefix="kv-file-read")
        self._waiting: deque[_Write] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._is_writing = False
        self._writer = threading.Thread(target=self._write_all, name="kv-file-write", daemon=True)
        self._writer.start()

    @property
    def state(self) -> DiskState:
        return self._health.state

    @property
    def bytes_used(self) -> int:
        return self._store.bytes_used

    @property
    def num_waiting(self) -> int:
        """Blocks whose write has not ended."""
        return len(self._waiting) + self._is_writing

    # -- reading ----------------------------------------------------------------------------------

    async def contains(self, names: Sequence[bytes], owner: bytes) -> int:
        """Mask of positions; 0 while the disk is off or fails."""
        return await self._read(lambda: self._store.contains(names, owner)) or 0

    async def get(self, name: bytes, owner: bytes, out: ByteArray) -> bytes | None:
        """Fill `out` with the block, verified; its checksum. None: not there, bad (and removed), or the disk failed.

        Goes on to its end in its thread when cancelled; `out` must stay what it is until then, so shield it.
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
        if not self._health.may_read(self._clock()):
            return None
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._readers, work)
        except OSError as error:
            self._tell(self._health.read(False, self._clock()), error)
            return None
        self._tell(self._health.read(True, self._clock()), None)
        return result

    # -- writing ----------------------------------------------------------------------------------

    def write(self, names: Sequence[bytes], first: int = 0) -> None:
        """Store these blocks of the pool in the background; `first` is the position of the first in its prompt."""
        for position, name in enumerate(names, first):
            pinned = self._pool.pin([name]) if self._has_room() else []
            if not pinned:
                self._counts.add(Tier.FILE, TierEvent.DROPPED)
                continue
            with self._changed:
                self._waiting.append(_Write(pinned[0], position))
                self._changed.notify_all()

    def keep(self, names: Sequence[bytes], owners: Sequence[bytes], until: float) -> None:
        """Have these blocks stay until then, of the wall clock, in the background. Those without a file are left out."""

        def work() -> None:
            try:
                for name, owner in zip(names, owners, strict=True):
                    self._store.keep(name, owner, until)
            except OSError as error:  # a read-only disk evicts nothing
                log.info("kv.tier.not_kept", cause=error.strerror)

        if not self._is_closing:
            self._readers.submit(work)

    def _has_room(self) -> bool:
        is_open = not self._is_closing and self._health.state is not DiskState.OFF
        return is_open and len(self._waiting) < self._max_waiting

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing waits to be written. False if the time is over first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.num_waiting, timeout_s)

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what waits, as far as the time allows, and end the threads. Idempotent."""
        self.flush(timeout_s)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._writer.join(timeout_s)
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                if self._is_closing:
                    dropped = list(self._waiting)
                    self._waiting.clear()
                    break
                item = self._waiting.popleft()
                self._is_writing = True
            try:
                self._write(item)
            finally:
                self._pool.unpin([item.block.name], is_use=False)
                with self._changed:
                    self._is_writing = False
                    self._changed.notify_all()
        for item in dropped:
            self._pool.unpin([item.block.name], is_use=False)

    def _write(self, item: _Write) -> None:
        block, now = item.block, self._clock()
        if not self._health.may_write(now):
            self._counts.add(Tier.FILE, TierEvent.DROPPED)
            return
        evicted = self._store.num_evicted
        try:
            is_new = self._store.put(
                block.name, block.owner, block.data, block.checksum, item.position
            )
        except OSError as error:
            self._counts.add(Tier.FILE, TierEvent.FAILED)
            self._tell(self._health.wrote(False, self._clock()), error)
            return
        if is_new:  # else nothing was written, which says nothing about the disk
            self._tell(self._health.wrote(True, self._clock()), None)
            self._counts.add(Tier.FILE, TierEvent.STORED)
        self._counts.add(Tier.FILE, TierEvent.EVICTED, self._store.num_evicted - evicted)

    def _tell(self, is_news: bool, error: OSError | None) -> None:
        if not is_news:
            return
        state = self._health.state
        cause = f"{error.__class__.__name__}: {error.strerror}" if error else "it works again"
        log.warning("kv.tier.disk", state=state.value, cause=cause)
        self._counts.fault(TierFault(Tier.FILE, _REASONS[state], cause))
