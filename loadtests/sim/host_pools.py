"""The workers' host pools on the virtual clock: blocks that a worker loads from its own pool or a
peer's and does not compute.

`core.kv.tiers.load_plan` decides which source serves which blocks, as in the mesh; a load takes the
time that its cost says. A pool keeps copies of the blocks that its worker computed or loaded, and
forgets the least recently used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdmesh.core.kv.prefix.prefix_index import TierDelta
from pdmesh.core.kv.tiers.load_plan import (
    CostBook,
    LoadPlan,
    Source,
    Tier,
    plan_load,
)


@dataclass(slots=True)
class _Pool:
    num_blocks: int
    held: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    stored: dict[bytes, None] = field(default_factory=dict)
    removed: dict[bytes, None] = field(default_factory=dict)

    def store(self, hashes: Iterable[bytes]) -> None:
        for name in hashes:
            if name not in self.held:
                self.removed.pop(name, None)
                self.stored[name] = None
            self.held[name] = None
            self.held.move_to_end(name)
        while len(self.held) > self.num_blocks:
            name, _ = self.held.popitem(last=False)
            if self.stored.pop(name, 0) == 0:
                self.removed[name] = None


@dataclass(slots=True)
class HostPools:
    """`num_blocks`: per worker; 0: there are no pools.

    `recompute_block_s`: the time to compute a block, which a load must beat.
    """

    num_blocks: int
    recompute_block_s: float
    is_shared: bool = True  # workers fetch from the pools of others
    costs: CostBook = field(default_factory=CostBook)
    num_loaded: dict[Tier, int] = field(default_factory=lambda: {Tier.HOST: 0, Tier.PEER: 0})
    _pools: dict[str, _Pool] = field(default_factory=dict)

    def load(self, worker: str, hashes: Sequence[bytes], first: int) -> tuple[int, float]:
        """(how many blocks from `first` on come from pools, seconds until all are there)."""
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
        return plan.num_blocks, self._seconds(plan)

    def store(self, worker: str, hashes: Iterable[bytes]) -> None:
        if self.num_blocks:
            self._pools.setdefault(worker, _Pool(self.num_blocks)).store(hashes)

    def take_changes(self, worker: str) -> TierDelta | None:
        pool = self._pools.get(worker)
        if pool is None or not (pool.stored or pool.removed):
            return None
        delta = TierDelta(tuple(pool.removed), tuple(pool.stored))
        pool.stored.clear()
        pool.removed.clear()
        return delta

    def _source(self, worker: str, name: str, hashes: Sequence[bytes]) -> Source:
        tier = Tier.HOST if name == worker else Tier.PEER
        held = sum((h in self._pools[name].held) << i for i, h in enumerate(hashes))
        return Source(tier, held, self.costs.costs[tier], name)

    def _seconds(self, plan: LoadPlan) -> float:
        """Sources work at the same time."""
        counts: dict[tuple[Tier, str], int] = {}
        for run in plan.runs:
            counts[run.tier, run.name] = counts.get((run.tier, run.name), 0) + run.count
        return max((self.costs.costs[tier].of(n) for (tier, _), n in counts.items()), default=0.0)
