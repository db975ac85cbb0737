"""Brings a prompt's KV blocks into the host pool before the prompt is computed (S76, S77).

The blocks come from files or from peers' pools. The file store and the KV index (which peer holds
which blocks) are asked at the same time. `core.kv.tiers.load_plan` chooses the blocks whose loading
saves time, and these are loaded at the same time. The wait ends at the caller's deadline, or when
the engine could have computed the blocks instead. The engine computes blocks that have not arrived
by then. Their load continues, for the next request. A failure of a tier only means fewer blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, Final, TypeVar

import structlog

from pdmesh.core.kv.prefix.pins import PinnedPrefix, pinned_within
from pdmesh.core.kv.tier import Tier
from pdmesh.core.kv.tiers.file_eviction import KEEP_FILES_S
from pdmesh.core.kv.tiers.load_plan import CostBook, LoadPlan, Source, plan_load, prefix_length
from pdmesh.core.kv.tiers.prefetch import most_prefetched
from pdmesh.core.kv.tiers.session_holds import MAX_HOLD_S, SessionState
from pdmesh.kv.tiers.file_tier import FileTier
from pdmesh.kv.tiers.host_pool import HostPool, PinnedBlock, is_intact
from pdmesh.kv.tiers.loads import Loads
from pdmesh.kv.tiers.peers import FindHolders, PeerHolding, PeerPools
from pdmesh.kv.tiers.report import TierCounts, TierEvent, TierReport

log = structlog.get_logger(__name__)
T = TypeVar("T")

LOOKUP_S: Final = 0.05  # time for all tiers together to say which blocks they hold
_CLOSE_S: Final = 2.0
_CHECK_ASIDE_BYTES: Final = 4 << 20  # checksums of more than this are computed beside the loop


@dataclass(slots=True)
class BlockLease:
    """Consecutive blocks of a chain, from position `first` on, pinned in the pool until `close`.

    A chain is the sequence of a prompt's block names. Any thread may use a lease, but only one
    thread at a time.
    """

    first: int
    blocks: list[PinnedBlock]
    tiers: list[Tier]  # the tier that each block came from
    _pool: HostPool
    _counts: TierCounts
    _is_closed: bool = False

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)

    def use(self, first: int, count: int) -> list[PinnedBlock]:
        """The blocks from position `first` on, to copy into the engine. Counts them as served."""
        start = first - self.first
        assert 0 <= start <= start + count <= len(self.blocks), "a plan names what its lease holds"
        assert not self._is_closed
        for tier in self.tiers[start : start + count]:
            self._counts.add(tier, TierEvent.SERVED)
        return self.blocks[start : start + count]

    def close(self) -> None:
        """Unpin the blocks. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._pool.unpin([block.name for block in self.blocks])


class TierStack:
    """The tiers of one rank: host pool, files, peers' pools.

    Call all methods except `stored` on one event loop. `clock` is monotonic.
    """

    def __init__(
        self,
        pool: HostPool,
        counts: TierCounts,
        clock: Callable[[], float],
        *,
        files: FileTier | None = None,
        costs: CostBook | None = None,
        lookup_s: float = LOOKUP_S,
    ) -> None:
        self._lookup_s = lookup_s
        self.pool, self.counts, self.files = pool, counts, files
        self.peers: PeerPools | None = None  # set once there is a KV agent that can fetch
        self.costs = costs or CostBook()
        self._clock = clock
        self._loads = Loads(pool, counts, self.costs, clock, files)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._num_evicted = 0
        self._num_pinned = self._num_leased = 0  # as last reported
        # By block name. Other threads read the mapping, so it is replaced and never changed.
        self._pinned: Mapping[bytes, PinnedPrefix] = {}
        self._is_closing = False

    @property
    def num_loading(self) -> int:
        return len(self._loads)

    # -- for requests -----------------------------------------------------------------------------

    async def fetch(
        self,
        names: Sequence[bytes],
        owner: bytes,
        first: int,
        timeout_s: float,
        find: FindHolders | None = None,
    ) -> BlockLease:
        """Load and pin the blocks from position `first` on, as many as arrive in time.

        The caller believes that the engine holds the blocks before `first`, but the engine may have
        evicted some. The lease must follow directly on blocks of the engine. Therefore the lease
        also has blocks just before `first`, if the pool holds them. `find` returns the peers that
        hold blocks of `names`, and must not raise. `fetch` raises only when cancelled.
        """
        end = self._clock() + timeout_s
        plan, holdings = await self._plan(names, owner, first, end, find)
        chain = names[first : first + plan.num_blocks]
        tiers = [run.tier for run in plan.runs for _ in range(run.count)]
        here = self._pin_runs_in_pool(names, plan)
        loads = self._loads.start(names, owner, plan, holdings, self.peers)
        compute_s = plan.num_blocks * self.costs.recompute_block_s
        try:
            await self._loads.wait(loads, min(end - self._clock(), compute_s))
            before = self._pin_backwards(names[:first])
            blocks = before + self.pool.pin(chain)
        finally:
            for load in loads:
                self._loads.leave(load)
            self.pool.unpin(here, is_use=False)
        blocks = await self._without_bad(blocks)
        tiers = [Tier.HOST] * len(before) + tiers
        begin = first - len(before)
        return BlockLease(begin, blocks, tiers[: len(blocks)], self.pool, self.counts)

    def prefetch(
        self,
        names: Sequence[bytes],
        owner: bytes,
        holder: PeerHolding,
        chance: float,
        timeout_s: float,
    ) -> None:
        """Load blocks from a peer before a prompt needs them, if this is expected to save time.

        `chance` is the probability that a prompt needs the blocks. `core.kv.tiers.prefetch` limits
        the number of blocks to what can be loaded within `timeout_s`. After a failed load from a
        peer, nothing is prefetched from this peer for some time.
        """
        if self.peers is None or self._is_closing or self._loads.failed_lately(holder.instance_id):
            return
        here, coming = self.pool.held(names), self._loads.coming(names)
        known = reduce(or_, coming.values(), here)
        missing = [i for i in range(len(names)) if not known >> i & 1]
        if not missing:
            return
        cost = self.costs.costs[Tier.PEER]
        num_new = most_prefetched(cost, timeout_s, self.pool.num_slots, self.num_loading)
        if num_new < len(missing):
            self.counts.add(Tier.PEER, TierEvent.DROPPED, len(missing) - num_new)
            names = names[: missing[num_new]]
        peer = holder.instance_id
        sources = [*self._sources(here, coming), Source(Tier.PEER, holder.held, cost, peer)]
        plan = plan_load(sources, 0, len(names), chance * self.costs.recompute_block_s)
        num_fetched = sum(run.count for run in plan.runs if run.name == peer)
        self.counts.add(Tier.PEER, TierEvent.PREFETCHED, num_fetched)
        for load in self._loads.start(names, owner, plan, {peer: holder}, self.peers):
            self._loads.leave(load)

    def note_session(
        self,
        state: SessionState,
        session: str,
        owner: bytes,
        names: Sequence[bytes],
        hold_s: float,
    ) -> None:
        """Hold, release or retire a session's blocks when its client pauses, resumes or ends it.

        A held block is evicted last, and a retired one first.
        """
        until = self._clock() + min(hold_s, MAX_HOLD_S)
        self.pool.note_session(state, session, owner, names, until)

    def _pin_backwards(self, names: Sequence[bytes]) -> list[PinnedBlock]:
        """Pin the longest run of blocks at the end of `names` that the pool holds completely."""
        here = self.pool.held(names)
        begin = len(names)
        while begin and here >> (begin - 1) & 1:
            begin -= 1
        blocks = self.pool.pin(names[begin:])
        if len(blocks) < len(names) - begin:  # another thread has just evicted one
            self.pool.unpin([block.name for block in blocks], is_use=False)
            return []
        return blocks

    def stored(self, names: Sequence[bytes], first: int = 0) -> None:
        """Note that the engine put these blocks into the pool, and write them to files.

        `first` is the position of the first block in its prompt. Thread-safe.
        """
        self.counts.add(Tier.HOST, TierEvent.STORED, len(names))
        if self.files is not None:
            self.files.write(names, first)
            if pinned := [name for name in names if name in self._pinned]:
                prefixes = [self._pinned[name] for name in pinned]
                self._keep_file(pinned, prefixes)

    def pin(self, prefixes: Sequence[PinnedPrefix]) -> None:
        """Keep the blocks of prefixes that an operator pinned: neither pool nor files evict them.

        Each call replaces the prefixes of the last call. `core.kv.prefix.pins` bounds their share.
        Files are kept until the pin ends.
        """
        before, names = self._pinned, [name for prefix in prefixes for name in prefix.names]
        self.pool.fix(names)
        self._pinned = {}
        if self.files is None:
            return
        self._pinned = pinned_within(prefixes, self.files.num_blocks_at_most)
        if over := [name for name in before if name not in self._pinned]:
            owners = [before[name].owner for name in over]
            self.files.keep(over, owners, [time.time()] * len(over))
        if self._pinned:
            self._keep_file(list(self._pinned), list(self._pinned.values()))

    def _keep_file(self, names: Sequence[bytes], prefixes: Sequence[PinnedPrefix]) -> None:
        assert self.files is not None
        self.files.keep(names, [p.owner for p in prefixes], [p.until for p in prefixes])

    def report(self) -> TierReport:
        """A report on the time since the last report.

        Call this often, because it also notices a disk that hangs and ends the holds of sessions.
        """
        if self.files is not None:
            self.files.watch()
        self.pool.end_holds(self._clock())
        evicted = self.pool.num_evicted
        self.counts.add(Tier.HOST, TierEvent.EVICTED, evicted - self._num_evicted)
        self._num_evicted = evicted
        self._keep_files()
        stored, removed = self.pool.take_changes()
        counts, seconds, faults = self.counts.take()
        used = {Tier.HOST.value: self.pool.num_blocks * self.pool.block_bytes}
        if self.files is not None:
            used[Tier.FILE.value] = self.files.bytes_used
        pinned, before = self.pool.num_fixed, self._num_pinned
        self._num_pinned = pinned
        num_pinned = None if pinned == before else pinned
        leased, before = self.pool.num_pinned, self._num_leased
        self._num_leased = leased
        num_leased = None if leased == before else leased
        return TierReport(counts, seconds, used, stored, removed, faults, num_pinned, num_leased)

    def _keep_files(self) -> None:
        """Keep the files of blocks that many requests use.

        Pools serve these blocks, so their files look unused. But later instances need the files.
        """
        kept = self.pool.take_kept()
        if kept and self.files is not None:
            names, owners = [name for name, _ in kept], [owner for _, owner in kept]
            self.files.keep(names, owners, [time.time() + KEEP_FILES_S] * len(names))

    async def close(self) -> None:
        """Close the tiers. Waits a short time for loads and writes under way. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        if tasks := [*self._tasks, *self._loads.tasks]:
            await asyncio.wait(tasks, timeout=_CLOSE_S)
        for task in tasks:
            task.cancel()
        if self.files is not None:
            await asyncio.to_thread(self.files.close)

    # -- looking up -------------------------------------------------------------------------------

    async def _plan(
        self,
        names: Sequence[bytes],
        owner: bytes,
        first: int,
        end: float,
        find: FindHolders | None,
    ) -> tuple[LoadPlan, dict[str, PeerHolding]]:
        here = self.pool.held(names)
        in_files, holdings = 0, list[PeerHolding]()
        missing = first + prefix_length(here, first)
        if missing < len(names) and not self._is_closing:
            timeout_s = min(self._lookup_s, end - self._clock())
            in_files, holdings = await self._look(names, missing, owner, timeout_s, find)
        # Blocks may have arrived during the look-up.
        here, coming = self.pool.held(names), self._loads.coming(names)
        costs = self.costs.costs
        sources = [
            *self._sources(here, coming),
            Source(Tier.FILE, in_files << missing, costs[Tier.FILE]),
            *(Source(Tier.PEER, h.held, costs[Tier.PEER], h.instance_id) for h in holdings),
        ]
        plan = plan_load(sources, first, len(names), self.costs.recompute_block_s)
        return plan, {holding.instance_id: holding for holding in holdings}

    def _sources(self, here: int, coming: Mapping[Tier, int]) -> list[Source]:
        """The pool and the loads under way, as sources of blocks."""
        costs = self.costs.costs
        under_way = [Source(tier, mask, costs[tier]) for tier, mask in coming.items()]
        return [Source(Tier.HOST, here, costs[Tier.HOST]), *under_way]

    async def _look(
        self,
        names: Sequence[bytes],
        missing: int,
        owner: bytes,
        timeout_s: float,
        find: FindHolders | None,
    ) -> tuple[int, list[PeerHolding]]:
        """Ask files and index at the same time. A late answer counts as empty (S106).

        Bit 0 of the files' mask stands for `missing`, the position of the first block that the pool
        lacks.
        """
        files = self._task(self.files.contains(names[missing:], owner)) if self.files else None
        peers = self._task(_asked(find, names, missing)) if self.peers and find else None
        if asks := [ask for ask in (files, peers) if ask is not None]:
            await asyncio.wait(asks, timeout=max(0.0, timeout_s))
        return _answer(files, 0), list(_answer(peers, ()))

    def _pin_runs_in_pool(self, names: Sequence[bytes], plan: LoadPlan) -> list[bytes]:
        """Pin the blocks that the plan takes from the pool, so that loads do not evict them."""
        pinned: list[bytes] = []
        for run in plan.runs:
            if run.tier is Tier.HOST:
                chain = names[run.first : run.first + run.count]
                pinned += [block.name for block in self.pool.pin(chain)]
        return pinned

    async def _without_bad(self, blocks: list[PinnedBlock]) -> list[PinnedBlock]:
        """The blocks before the first one whose bytes changed in memory after it was stored."""
        try:
            if sum(block.data.size for block in blocks) > _CHECK_ASIDE_BYTES:
                num_good = await asyncio.to_thread(_num_intact, blocks)
            else:
                num_good = _num_intact(blocks)
        except asyncio.CancelledError:
            self.pool.unpin([block.name for block in blocks], is_use=False)
            raise
        if num_good < len(blocks):
            bad = blocks[num_good].name
            log.warning("kv.tier.corrupt", tier=Tier.HOST.value, block=bad.hex(), cause="memory")
            self.counts.add(Tier.HOST, TierEvent.CORRUPT)
            self.pool.forget(bad)
            self.pool.unpin([block.name for block in blocks[num_good:]], is_use=False)
        return blocks[:num_good]

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _answer(ask: asyncio.Task[T] | None, nothing: T) -> T:
    """The answer of a look-up, or `nothing` if it is late or has failed.

    A late look-up is cancelled, because look-ups would otherwise pile up behind a disk that hangs.
    """
    # The look-up may also have been cancelled because the index's channel was closed.
    if ask is None or ask.cancel() or ask.cancelled():
        return nothing
    if (error := ask.exception()) is not None:
        log.error("kv.tier.lookup_died", exc_info=error)
        return nothing
    return ask.result()


async def _asked(find: FindHolders, names: Sequence[bytes], first: int) -> Sequence[PeerHolding]:
    return await find(names, first)


def _num_intact(blocks: Sequence[PinnedBlock]) -> int:
    for position, block in enumerate(blocks):
        if not is_intact(block):
            return position
    return len(blocks)
