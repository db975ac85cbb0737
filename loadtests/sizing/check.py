"""Checks the plan for one scene and load against the simulation on the virtual mesh."""

from __future__ import annotations

from dataclasses import dataclass, replace

from loadtests.sizing.played import Times, highest, keeps, play
from loadtests.sizing.scenes import Scene
from pdmesh.core.sizing.advice import PlanAnswer, answer_of, ranges_of
from pdmesh.core.sizing.deployment import Deployment, Seen, fused, pair_of
from pdmesh.core.sizing.search import NotPossible, Workload, holds, smallest_fusion, smallest_pair

_NO_LIMIT = 0.999  # max_busy of a plan that only the goals limit, as in the simulation


@dataclass(frozen=True, slots=True)
class Side:
    """The check of one kind of deployment (P/D or fusion).

    `planned_per_s` and `played_per_s` are the highest rates that meet the goals, in requests/s.
    `can_spare` says for each role whether the mesh keeps the goals with one instance less.
    """

    deployment: str
    num_gpus: int
    seen: Seen
    played: Times
    planned_per_s: float
    played_per_s: float
    can_spare: dict[str, bool]

    @property
    def load_error(self) -> float:
        """The plan's relative error about the load. It is above 0 if the mesh carries less."""
        return self.planned_per_s / self.played_per_s - 1

    def needed_gpus(self, rate_per_s: float) -> float:
        """The GPUs that the mesh needs at this rate.

        The result is the planned number if these GPUs carry the rate and no instance can be spared.
        Otherwise, it is the rate divided by the rate of one GPU, which need not be a whole number.
        """
        if self.played_per_s >= rate_per_s and not any(self.can_spare.values()):
            return self.num_gpus
        return self.num_gpus * rate_per_s / self.played_per_s


@dataclass(frozen=True, slots=True)
class Checked:
    """The check of one scene under one load.

    `answer` is the plan's answer. `pair` or `fusion` is None if that kind cannot meet the goals.
    """

    scene: str
    rate_per_s: float
    answer: str
    pair: Side | None
    fusion: Side | None
    ranges: tuple[str, str]

    @property
    def is_right(self) -> bool:
        """Whether the plan names the kind that needs fewer GPUs on the mesh.

        It is also True if the plan names no kind, or if one kind cannot meet the goals.
        """
        if self.pair is None or self.fusion is None:
            return True
        pair = self.pair.needed_gpus(self.rate_per_s)
        fusion = self.fusion.needed_gpus(self.rate_per_s)
        if self.answer == PlanAnswer.PAYS.value:
            return pair < fusion
        return fusion < pair if self.answer == PlanAnswer.FUSION.value else True


def check(scene: Scene, rate_per_s: float, seed: int) -> Checked:
    wanted = scene.wanted(rate_per_s)
    pair, fusion = smallest_pair(wanted), smallest_fusion(wanted)
    ranges = ranges_of(wanted, pair, fusion)
    return Checked(
        scene.name,
        rate_per_s,
        answer_of(*ranges).value,
        _side(pair, wanted, seed),
        _side(fusion, wanted, seed),
        (str(ranges[0] or "none"), str(ranges[1] or "none")),
    )


def _side(found: Deployment | NotPossible, wanted: Workload, seed: int) -> Side | None:
    if isinstance(found, NotPossible):
        return None
    rate = wanted.traffic.rate_per_s
    free = replace(wanted, max_busy=_NO_LIMIT)
    planned = highest(lambda each: holds(found, free.at(each)), rate, 0.005)
    played = highest(lambda each: keeps(found, wanted.at(each), seed), planned)
    again = _planned(found, wanted)
    return Side(
        str(found),
        found.num_gpus,
        again.seen,
        play(found, wanted, seed),
        planned,
        played,
        {role: _can_spare(found, i, wanted, seed) for i, role in enumerate(_roles(found))},
    )


def _planned(found: Deployment, wanted: Workload) -> Deployment:
    """The deployment with all the slots that its memory allows, as in the simulation."""
    if found.is_fusion:
        return fused(found.pools[0], wanted.traffic, wanted.goals)
    prefill, decode = found.pools
    return pair_of(prefill, decode, wanted.traffic, wanted.goals)


def _roles(found: Deployment) -> tuple[str, ...]:
    return ("fusion",) if found.is_fusion else ("prefill", "decode")


def _can_spare(found: Deployment, index: int, wanted: Workload, seed: int) -> bool:
    if found.pools[index].count == 1:
        return False
    pools = tuple(
        replace(pool, count=pool.count - (i == index)) for i, pool in enumerate(found.pools)
    )
    return keeps(replace(found, pools=pools), wanted, seed)
