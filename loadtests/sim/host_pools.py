"""Simulates the workers' host pools (KV in host memory) on the virtual clock.

A worker loads blocks from its own pool or from a peer's instead of computing them.
`core.kv.tiers.load_plan` decides which source serves which blocks, as in the mesh. A load takes its
planned time. A pool keeps copies of the blocks that its worker computed or loaded.
`core.kv.tiers.pool_eviction` decides which blocks are evicted. The clients' hints about sessions
have the same effect as in the mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from pdmesh.core.kv.prefix.prefix_index import TierDelta
from pdmesh.core.kv.tier import Tier
from pdmesh.core.kv.tiers.load_plan import CostBook, LoadPlan, Source, plan_load
from pdmesh.core.kv.tiers.pool_eviction import PoolBook
from pdmesh.core.kv.tiers.session_holds import SessionState

_OWNER: Final = b""  # all requests belong to one tenant


@dataclass(slots=True)
class _Pool:
    book: PoolBook

    def store(self, hashes: Sequence[bytes]) -> None:
        for name in hashes:
            if name not in self.book and self.book.reserve(name, _OWNER) is not None:
                self.book.commit(name)
        self.book.touch(hashes)

    def use(self, hashes: Iterable[bytes]) -> None:
        for name in hashes:
            if self.book.pin(name) is not None:
                self.book.unpin(name)


@dataclass(slots=True)
class HostPools:
    """The host pools of all workers, each with `num_blocks`. With 0, there are no pools.

    `recompute_block_s` is the time to compute a block. A load must be faster.
    """

    num_blocks: int
    recompute_block_s: float
    is_shared: bool = True  # whether workers fetch from the pools of others
    # for this time, other blocks are evicted before those of a paused session
    hold_s: float = 120.0
    costs: CostBook = field(default_factory=CostBook)
    num_loaded: dict[Tier, int] = field(default_factory=lambda: {Tier.HOST: 0, Tier.PEER: 0})
    _pools: dict[str, _Pool] = field(default_factory=dict)

    def load(self, worker: str, hashes: Sequence[bytes], first: int) -> tuple[int, float]:
        """Plan a load of a prompt's blocks from index `first` on.

        Returns the number of blocks that come from pools, and the seconds that the load takes.
        """
        if not self.num_blocks or first >= len(hashes):
            return 0, 0.0
        plan = plan_load(
            [
                s
                for name in (self._pools if self.is_shared else self._pools.keys() & {worker})
                if (s := self._source(worker, name, hashes)).held
            ],
            first,
            len(hashes),
            self.recompute_block_s,
        )
        for run in plan.runs:
            self.num_loaded[run.tier] += run.count
            self._pools[run.name].use(hashes[run.first : run.first + run.count])
        return plan.num_blocks, self._seconds(plan)

    def store(self, worker: str, hashes: Sequence[bytes]) -> None:
        if self.num_blocks:
            self._pools.setdefault(worker, _Pool(PoolBook(self.num_blocks))).store(hashes)

    def note_session(
        self, worker: str, state: SessionState, session: str, hashes: Sequence[bytes], now: float
    ) -> None:
        """Record the client's hint about whether its session needs these blocks again soon."""
        if (pool := self._pools.get(worker)) is None:
            return
        pool.book.end_holds(now)
        match state:
            case SessionState.PAUSED_FOR_TOOL:
                pool.book.hold(session, _OWNER, hashes, now + self.hold_s)
            case SessionState.RESUMED:
                pool.book.resume(session)
            case SessionState.DONE:
                pool.book.retire(session, hashes)

    def take_changes(self, worker: str) -> TierDelta | None:
        if (pool := self._pools.get(worker)) is None:
            return None
        stored, removed = pool.book.take_changes()
        return TierDelta(removed, stored) if stored or removed else None

    def _source(self, worker: str, name: str, hashes: Sequence[bytes]) -> Source:
        tier = Tier.HOST if name == worker else Tier.PEER
        held = self._pools[name].book.held(hashes)
        return Source(tier, held, self.costs.costs[tier], name)

    def _seconds(self, plan: LoadPlan) -> float:
        """The seconds of a load. Sources work at the same time, so the slowest source decides."""
        counts: dict[tuple[Tier, str], int] = {}
        for run in plan.runs:
            counts[run.tier, run.name] = counts.get((run.tier, run.name), 0) + run.count
        return max((self.costs.costs[tier].of(n) for (tier, _), n in counts.items()), default=0.0)
