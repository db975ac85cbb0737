"""Decides which blocks of a prompt are loaded from which tier, so that it saves time (S76, S106).

A tier is a place for KV: host memory, the host memory of peers, or files. The blocks to load are an
unbroken run of the prompt's blocks, which begins with the first block that the engine lacks. Each
block comes from the fastest source that holds it, and sources work at the same time. The run ends
where loading saves the most time compared with computing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdmesh.core.kv.tier import Tier

_ORDER = {tier: rank for rank, tier in enumerate(Tier)}


def prefix_length(mask: int, first: int = 0) -> int:
    """How many positions from `first` on are set in the mask without a gap."""
    mask >>= first
    return (~mask & (mask + 1)).bit_length() - 1


@dataclass(frozen=True, slots=True)
class Cost:
    """The time to load from a source: a fixed wait, and a time per block."""

    latency_s: float
    block_s: float

    def of(self, num_blocks: int) -> float:
        return self.latency_s + num_blocks * self.block_s if num_blocks else 0.0


@dataclass(frozen=True, slots=True)
class Source:
    """A place with some of the blocks. `held` is a mask of positions. `name` identifies a peer."""

    tier: Tier
    held: int
    cost: Cost
    name: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks `first` to `first + count - 1` of the prompt, which come from one source."""

    tier: Tier
    name: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The runs to load, in order and without gaps, and the time that this saves."""

    runs: tuple[Run, ...] = ()
    saved_s: float = 0.0

    @property
    def num_blocks(self) -> int:
        return sum(run.count for run in self.runs)


def plan_load(
    sources: Sequence[Source],
    first: int,
    num_blocks: int,
    recompute_block_s: float,
    min_saved_s: float = 0.0,
) -> LoadPlan:
    """Choose the blocks to load out of the blocks `first` to `num_blocks - 1`.

    The plan is empty if loading saves less than `min_saved_s`. If several run lengths save equally
    much, the longest is chosen, since it leaves the engine's compute to other requests.
    """
    ranked = sorted(sources, key=lambda s: (s.cost.block_s, s.cost.latency_s, _ORDER[s.tier]))
    chosen: list[int] = []  # by position from `first`, an index into `ranked`
    counts = [0] * len(ranked)
    best, best_saved, slowest = 0, 0.0, 0.0
    for position in range(first, num_blocks):
        found = next((i for i, s in enumerate(ranked) if s.held >> position & 1), None)
        if found is None:
            break
        chosen.append(found)
        counts[found] += 1
        slowest = max(slowest, ranked[found].cost.of(counts[found]))
        saved = len(chosen) * recompute_block_s - slowest
        if saved >= best_saved:
            best, best_saved = len(chosen), saved
    if best == 0 or best_saved < min_saved_s:
        return LoadPlan()
    return LoadPlan(tuple(_runs(ranked, chosen[:best], first)), best_saved)


def _runs(ranked: Sequence[Source], chosen: Sequence[int], first: int) -> Iterable[Run]:
    start = 0
    for end in range(1, len(chosen) + 1):
        if end == len(chosen) or chosen[end] != chosen[start]:
            source = ranked[chosen[start]]
            yield Run(source.tier, source.name, first + start, end - start)
            start = end


@dataclass(slots=True)
class CostBook:
    """How long recent loads took, per tier, and how long computing a block takes.

    Both are moving averages, which start from a guess.
    """

    costs: dict[Tier, Cost] = field(
        default_factory=lambda: {
            Tier.HOST: Cost(0.0, 0.0005),
            Tier.PEER: Cost(0.002, 0.002),
            Tier.FILE: Cost(0.001, 0.003),
        }
    )
    recompute_block_s: float = 0.02
    weight: float = 0.1  # how much the newest observation changes an average

    def loaded(self, tier: Tier, num_blocks: int, duration_s: float) -> None:
        """Record that loading `num_blocks` took `duration_s`.

        The latency is taken as constant, and the rest of the time is divided by the blocks.
        """
        if num_blocks <= 0:
            return
        old = self.costs[tier]
        block_s = max(0.0, duration_s - old.latency_s) / num_blocks
        self.costs[tier] = Cost(old.latency_s, self._moved(old.block_s, block_s))

    def computed(self, num_blocks: float, duration_s: float) -> None:
        """Record that computing `num_blocks` took `duration_s`, other requests' work included."""
        if num_blocks > 0:
            self.recompute_block_s = self._moved(self.recompute_block_s, duration_s / num_blocks)

    def _moved(self, old: float, new: float) -> float:
        return old + self.weight * (new - old)
