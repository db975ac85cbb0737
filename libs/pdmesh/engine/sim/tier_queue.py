"""Lets prompts of the simulated engine wait for KV blocks from the tiers, for a bounded time.

A tier is a place for KV below the engine: host memory, peers' host memory, files. Fetched blocks
are copied into the engine's paged memory when the prompt joins a step. The blocks that a step
completes are copied to the host pool, one by one (S76, S77). A leg is a request's stay on this
engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdmesh.core.kv.tier import Tier
from pdmesh.core.kv.tiers.owner import owner_of
from pdmesh.engine.base import (
    BlocksChanged,
    Output,
    Prefetch,
    PrefillJob,
    SessionHint,
    TiersReported,
)
from pdmesh.engine.sim.memory import SimKv
from pdmesh.kv.device.scatter import gather, recv_scatter
from pdmesh.kv.tiers.peers import FindHolders, PeerHolding
from pdmesh.kv.tiers.report import REPORT_EVERY_S, TierEvent
from pdmesh.kv.tiers.stack import BlockLease, TierStack
from pdmesh.kv.transport.base import ByteArray
from pdmesh.net.tasks import watched


@dataclass(frozen=True, slots=True)
class FetchedBlocks:
    """Where a prompt's missing blocks come from, and how long the prompt waits for them at most."""

    stack: TierStack
    timeout_s: float
    find: FindHolders | None = None  # finds peers that hold blocks; with None, no peer is asked


class TierQueue:
    """The prompts that wait for blocks.

    `on_ready` is called with each prompt when its fetch has ended.
    """

    def __init__(
        self,
        source: FetchedBlocks,
        kv: SimKv,
        emit: Callable[[Output], None],
        on_ready: Callable[[PrefillJob], None],
        die: Callable[[BaseException], None],
    ) -> None:
        self.stack, self._timeout_s, self._find = source.stack, source.timeout_s, source.find
        self._memory, self._pool = kv.memory, kv.pool
        self._emit, self._on_ready, self._die = emit, on_ready, die
        self._jobs: dict[int, PrefillJob] = {}
        self._fetches: dict[int, asyncio.Task[BlockLease]] = {}
        self._leases: dict[int, BlockLease] = {}
        self._reporter: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._jobs)

    @property
    def is_idle(self) -> bool:
        return not (self._jobs or self._fetches or self._leases)

    def start(self) -> None:
        self._reporter = watched(self._report(), "tier-reports", self._die)

    async def stop(self) -> None:
        if self._reporter is not None:
            self._reporter.cancel()
        for task in self._fetches.values():
            task.cancel()
        await self.stack.close()
        self.stack.pool.close()

    def begin(self, job: PrefillJob) -> bool:
        """Begin to fetch a job's missing blocks.

        Returns False if there is nothing to fetch: the job has no block names, or the engine has
        all its blocks.
        """
        names = self._names(job)
        first = self._pool.num_held(names)
        if first == len(names):
            return False
        owner = owner_of(job.cache_salt)
        work = self.stack.fetch(names, owner, first, self._timeout_s, self._find)
        task = asyncio.create_task(work, name=f"tiers-{job.leg}")
        self._jobs[job.leg] = job
        self._fetches[job.leg] = task
        task.add_done_callback(lambda done: self._fetched(job, done))
        return True

    def abort(self, leg: int) -> PrefillJob | None:
        """Remove a leg. Returns the leg's job, if the job waited here."""
        job = self._jobs.pop(leg, None)
        if (task := self._fetches.get(leg)) is not None:
            task.cancel()
        if (lease := self._leases.pop(leg, None)) is not None:
            lease.close()
        return job

    def _fetched(self, job: PrefillJob, task: asyncio.Task[BlockLease]) -> None:
        del self._fetches[job.leg]
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._die(error)
            return
        lease = task.result()
        if self._jobs.pop(job.leg, None) is None:  # it was aborted just after the fetch ended
            lease.close()
            return
        self._leases[job.leg] = lease
        self._on_ready(job)

    def note_session(self, hint: SessionHint) -> None:
        owner = owner_of(hint.tenant)
        self.stack.note_session(hint.state, hint.session, owner, hint.names, hint.hold_s)

    def prefetch(self, wanted: Prefetch) -> None:
        peer, num_blocks = wanted.peer, len(wanted.names)
        holder = PeerHolding(peer.instance_id, peer.incarnation, peer.addresses, 0, num_blocks)
        owner = owner_of(wanted.cache_salt)
        self.stack.prefetch(wanted.names, owner, holder, wanted.chance, self._timeout_s)

    # -- in a step --------------------------------------------------------------------------------

    def load(self, job: PrefillJob, num_local: int) -> list[int]:
        """Copy the fetched KV into new engine blocks, and return these blocks.

        The engine has the first `num_local` blocks of the prompt already. The new blocks follow
        them, and are stored under their names.
        """
        if (lease := self._leases.pop(job.leg, None)) is None:
            return []
        try:
            if not lease.first <= num_local < lease.end:
                return []
            count = lease.end - num_local
            blocks = self._pool.allocate(count)
            for block, got in zip(blocks, lease.use(num_local, count), strict=True):
                recv_scatter(got.data, self._memory.caches, [block])
                self._pool.store(block, got.name)
            return blocks
        finally:
            lease.close()

    def save(
        self, cache_salt: str, names: Sequence[bytes], blocks: Sequence[int], first: int = 0
    ) -> None:
        """Copy blocks to the host pool, from position `first` on, unless the pool has them.

        `names` and `blocks` begin at the start of the sequence. The sequence must still have its
        references to the blocks.
        """
        pool, owner = self.stack.pool, owner_of(cache_salt)
        held = pool.held(names)
        for position, (name, block) in enumerate(zip(names, blocks, strict=False)):
            if position < first or held >> position & 1:
                continue

            def write(out: ByteArray, block: int = block) -> None:
                gather(self._memory.caches, [block], out)

            if pool.put(name, owner, write):
                self.stack.stored([name], position)
            else:
                self.stack.counts.add(Tier.HOST, TierEvent.DROPPED)
        pool.touch(names)

    # -- reports ----------------------------------------------------------------------------------

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            report = self.stack.report()
            if not report.is_empty:
                self._emit(TiersReported(report))
            if report.stored or report.removed:
                self._emit(BlocksChanged(report.stored, report.removed, tier=Tier.HOST))

    def _names(self, job: PrefillJob) -> Sequence[bytes]:
        """The names of the blocks that may be loaded instead of computed.

        The block of the last token is left out, because the first draw needs this token computed.
        """
        if not job.cache_salt:
            return ()
        return job.block_hashes[: (len(job.prompt) - 1) // self._memory.model.params.block_size]
