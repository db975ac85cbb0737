"""Says whether P/D pays for a workload, by comparing the smallest deployment of each kind.

P/D has prefill and decode on different instances, and fusion has both on each instance. The queues
in a plan are approximations. Their error, as an error in load, was measured against a simulated
mesh (`make bench NAME=sizing`). So each kind gets a range: the devices that it needs if the load is
smaller or larger by that error. If the ranges overlap, there is no difference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from pdmesh.core.sizing.deployment import Deployment
from pdmesh.core.sizing.search import NotPossible, Workload, smallest_fusion, smallest_pair
from pdmesh.core.sizing.traffic import Goals

LOAD_ERROR: Final = 0.2  # loadtests/results/sizing-2026-11-28.md


class PlanAnswer(Enum):
    """The value of each answer is its text."""

    PAYS = "P/D pays"
    FUSION = "fusion is cheaper"
    EQUAL = "no difference within the error"
    ONLY_PAIR = "only P/D holds the goals"
    ONLY_FUSION = "only fusion holds the goals"
    NEITHER = "no deployment holds the goals"


@dataclass(frozen=True, slots=True)
class GpuRange:
    """The devices that are needed at the planned load minus the error, and plus the error."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class Advice:
    answer: PlanAnswer
    pair: Deployment | NotPossible
    fusion: Deployment | NotPossible
    pair_range: GpuRange | None
    fusion_range: GpuRange | None
    reasons: tuple[str, ...]

    @property
    def chosen(self) -> Deployment | None:
        """The smaller deployment. If both are equal, this is fusion, because fusion moves no KV."""
        sides = [s for s in (self.fusion, self.pair) if isinstance(s, Deployment)]
        return min(sides, key=lambda side: side.num_gpus, default=None)


def advise(wanted: Workload, error: float = LOAD_ERROR) -> Advice:
    pair, fusion = smallest_pair(wanted), smallest_fusion(wanted)
    ranges = ranges_of(wanted, pair, fusion, error)
    reasons = tuple(_reasons(wanted, pair, fusion))
    return Advice(answer_of(*ranges), pair, fusion, *ranges, reasons)


def ranges_of(
    wanted: Workload,
    pair: Deployment | NotPossible,
    fusion: Deployment | NotPossible,
    error: float = LOAD_ERROR,
) -> tuple[GpuRange | None, GpuRange | None]:
    return _range(wanted, pair, error), _range(wanted, fusion, error)


def _range(wanted: Workload, found: Deployment | NotPossible, error: float) -> GpuRange | None:
    if isinstance(found, NotPossible):
        return None
    search = smallest_fusion if found.is_fusion else smallest_pair
    # Search only among the kinds of the found deployment: a slightly different load must not change
    # the number of ranks.
    kinds = tuple(dict.fromkeys(pool.kind for pool in found.pools))
    wanted = replace(wanted, kinds=kinds, chunks=(found.pools[0].chunk,))
    rate = wanted.traffic.rate_per_s
    ends = [search(wanted.at(rate * factor)) for factor in (1 - error, 1 + error)]
    sizes = [end.num_gpus for end in ends if isinstance(end, Deployment)]
    return GpuRange(min([*sizes, found.num_gpus]), max([*sizes, found.num_gpus]))


def answer_of(pair: GpuRange | None, fusion: GpuRange | None) -> PlanAnswer:
    if pair is None or fusion is None:
        if pair is fusion:
            return PlanAnswer.NEITHER
        return PlanAnswer.ONLY_FUSION if pair is None else PlanAnswer.ONLY_PAIR
    if pair.high < fusion.low:
        return PlanAnswer.PAYS
    return PlanAnswer.FUSION if fusion.high < pair.low else PlanAnswer.EQUAL


def _reasons(
    wanted: Workload, pair: Deployment | NotPossible, fusion: Deployment | NotPossible
) -> list[str]:
    told = list[str]()
    for name, side in (("P/D", pair), ("fusion", fusion)):
        if isinstance(side, NotPossible):
            told.append(f"{name}: {side.reason}")
    if isinstance(pair, Deployment):
        told += _of_pair(pair, wanted)
    if isinstance(fusion, Deployment):
        told += _of_fusion(fusion, wanted, pair)
    return told


def _of_pair(pair: Deployment, wanted: Workload) -> list[str]:
    prefill, decode = pair.pools
    seen = pair.seen
    told = [
        (
            f"P/D: prefills compute {seen.busy:.0%} of the time; a decode runs"
            f" {seen.batch:.0f} answers at once; a prompt's KV travels"
            f" {1000 * seen.transfer_s:.1f} ms"
        )
    ]
    floor = [role for role, pool in (("prefills", prefill), ("decodes", decode))
             if pool.count == wanted.least]  # fmt: skip
    if floor:
        told.append(
            f"P/D: {wanted.least} {' and '.join(floor)} are the least that is asked for"
            " (--least), whatever the load"
        )
    return told


def _of_fusion(fusion: Deployment, wanted: Workload, pair: Deployment | NotPossible) -> list[str]:
    seen, goals = fusion.seen, wanted.goals
    told = [
        (
            f"fusion: {seen.busy:.0%} of the time is in steps that compute prompts too, for which"
            f" the running answers wait; chunks of {fusion.pools[0].chunk} tokens"
        )
    ]
    if isinstance(pair, Deployment) and fusion.pools[0].count > wanted.least:
        told.append(f"fusion: {_limit(seen.ttft_s, seen.tpot_s, goals)} decides how many it needs")
    return told


def _limit(ttft_s: float, tpot_s: float, goals: Goals) -> str:
    return "TPOT" if tpot_s / goals.tpot_s > ttft_s / goals.ttft_s else "TTFT"
