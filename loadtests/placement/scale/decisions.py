"""What a decision costs by the number of instances.

Decisions are measured in the core, through gRPC, and at a gateway that cannot reach its master.
Sizes take turns every few decisions, so that other load on the machine is the same for all. Each
decision is made twice with the same random draws. The first reads instances that may no longer be
in the processor's caches, as in a mesh, so it also waits for memory. The second reads the same
instances again and only computes.
"""

from __future__ import annotations

import asyncio
import cProfile
import pstats
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from loadtests.harness.results import quantile
from loadtests.placement.plan import NUM_BLOCKS, ask, build, master, prompt, settle
from pdmesh.core.kv.prefix.prefix_index import PrefixIndex
from pdmesh.core.model import Role
from pdmesh.core.placement.instance import Instance
from pdmesh.core.placement.local_ranking import LocalInstance, LocalQuery, LocalRanking
from pdmesh.core.placement.plan import Placement, Plan
from pdmesh.core.placement.policies import Known, Query
from pdmesh.service_process import calm_the_collector

SIZES: Final = (100, 1250, 10_000)
RTP: Final = 1250  # 750 prefills and 500 decodes
_RTP_PREFILLS: Final = 0.6
_PROFILED: Final = 64  # decisions that are profiled
_IN_A_ROW: Final = 25
_COMPARED: Final = 8  # one in 8 decisions is made again with all instances scored


@dataclass(slots=True)
class Decider:
    """Makes decisions, one after another, on a fleet with its index."""

    placement: Placement
    index: PrefixIndex
    now: float = 0.0
    num_made: int = 0
    prompts: Sequence[list[bytes]] = field(default_factory=lambda: [prompt(i) for i in range(64)])

    def decide(self) -> tuple[float, float]:
        """Make the next decision twice; returns the CPU seconds of both."""
        rng = self.placement.rng
        query, draws = self._next(), rng.getstate()
        first_s, _ = self._timed(query)
        rng.setstate(draws)
        again_s, plan = self._timed(query)
        settle(self.placement, plan, query.request_id, self.now)
        return first_s, again_s

    def score_all(self) -> None:
        """Score all instances from now on, without a shortlist."""
        self.placement.policy = replace(self.placement.policy, most_scored=0)

    def num_calls(self) -> float:
        """The mean number of function calls in a decision, of Python's and C's functions."""
        profile = cProfile.Profile()
        for _ in range(_PROFILED):
            query = self._next()
            profile.enable()
            plan = self._plan(query)
            profile.disable()
            settle(self.placement, plan, query.request_id, self.now)
        calls: int = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
        return calls / _PROFILED

    def run(self, num_decisions: int) -> tuple[list[float], list[float]]:
        """Make decisions without a pause; returns the wall time and the CPU time of each, in
        seconds.
        """
        walls, cpus = [], []
        for _ in range(num_decisions):
            query, began = self._next(), time.perf_counter()
            cpu_s, plan = self._timed(query)
            walls.append(time.perf_counter() - began)
            cpus.append(cpu_s)
            settle(self.placement, plan, query.request_id, self.now)
        return walls, cpus

    def mean_scored(self) -> float:
        """The mean number of prefills and decodes that a decision scores."""
        own, counts = self.placement.policy, list[int]()

        def prefills(query: Query, asked: Sequence[Instance], known: Known) -> Sequence[float]:
            counts.append(len(asked))
            return own.score_prefills(query, asked, known)

        def decodes(query: Query, asked: Sequence[Instance]) -> Sequence[float]:
            counts.append(len(asked))
            return own.score_decodes(query, asked)

        self.placement.policy = replace(own, score_prefills=prefills, score_decodes=decodes)
        self.run(_PROFILED)
        self.placement.policy = own
        return sum(counts) / _PROFILED

    def _next(self) -> Query:
        self.now += 0.001
        self.num_made += 1
        return Query(
            block_hashes=self.prompts[self.num_made % len(self.prompts)],
            num_prompt_tokens=NUM_BLOCKS * 64,
            max_tokens=256,
            request_id=f"r{self.num_made}",
        )

    def _timed(self, query: Query) -> tuple[float, Plan]:
        began = time.thread_time()
        plan = self._plan(query)
        return time.thread_time() - began, plan

    def _plan(self, query: Query) -> Plan:
        matches = self.index.match(query.block_hashes)
        plan = self.placement.plan(query, matches, self.now, num_cached=self.index.num_blocks_of)
        assert isinstance(plan, Plan)
        return plan


def in_the_core(num_decisions: int) -> dict[str, float]:
    """Measure one round in the core. It should run in a process of its own."""
    deciders = {size: Decider(*build(size)) for size in SIZES}
    calm_the_collector()  # as a service does
    times: dict[int, list[tuple[float, float]]] = {size: [] for size in SIZES}
    for _ in range(max(1, num_decisions // _IN_A_ROW)):
        for size, decider in deciders.items():
            times[size] += [decider.decide() for _ in range(_IN_A_ROW)]
    found: dict[str, float] = {}
    p50: dict[str, dict[int, float]] = {"first": {}, "again": {}, "calls": {}, "scored": {}}
    for size, decider in deciders.items():
        where = f"core, {size:,} instances"
        first, again = (sorted(1e3 * t for t in both) for both in zip(*times[size], strict=True))
        p50["first"][size], p50["again"][size] = quantile(first, 0.5), quantile(again, 0.5)
        p50["calls"][size] = decider.num_calls()
        p50["scored"][size] = decider.mean_scored()
        decider.score_all()
        every = sorted(1e3 * decider.decide()[0] for _ in range(num_decisions // _COMPARED))
        found |= {
            f"{where}: CPU ms of a decision, p50": p50["first"][size],
            f"{where}: p99": quantile(first, 0.99),
            f"{where}: the same decision again, p50": p50["again"][size],
            f"{where}: calls of functions": p50["calls"][size],
            f"{where}: prefills and decodes scored": p50["scored"][size],
            f"{where}: all scored, p50": quantile(every, 0.5),
            f"{where}: p50 / all scored": p50["first"][size] / quantile(every, 0.5),
        }
    for what, name in (
        ("first", "CPU, p50"),
        ("again", "CPU of the same decision again, p50"),
        ("calls", "calls of functions"),
        ("scored", "scored"),
    ):
        found[f"core: 10,000 / 1,250 instances, {name}"] = p50[what][10_000] / p50[what][RTP]
    return found


def through_grpc(num_decisions: int) -> dict[str, float]:
    """Measure the calls of one master, and the same core called without gRPC for comparison.

    The core without gRPC stands for a replica in a gateway.
    """
    found = _in_this_process(num_decisions)
    for scores_all in (False, True):
        how = "all scored" if scores_all else "shortlist"
        with master(RTP, _RTP_PREFILLS, scores_all=scores_all) as (port, processes):
            for batch, streams in ((1, 4), (16, 2)):
                began = time.process_time()
                cost = asyncio.run(ask(port, processes, RTP, batch, streams, num_decisions))
                asking_s = time.process_time() - began
                where = f"gRPC, 750 + 500, {how}, {streams} gateways, {batch} a message"
                found |= {
                    f"{where}: decisions/s": cost.per_s,
                    f"{where}: p99 ms of a message": cost.p99_ms,
                    f"{where}: master's CPU ms of a decision": cost.cpu_ms,
                    f"{where}: gateways' CPU ms of a decision": 1e3 * asking_s / cost.num,
                }
    return found


def _in_this_process(num_decisions: int) -> dict[str, float]:
    decider = Decider(*build(RTP, _RTP_PREFILLS))
    calm_the_collector()
    began = time.perf_counter()
    walls, cpus = decider.run(num_decisions)
    wall_s = time.perf_counter() - began
    where = "no gRPC, 750 + 500, as a replica in a gateway"
    return {
        f"{where}: decisions/s": num_decisions / wall_s,
        f"{where}: p99 ms": 1e3 * quantile(sorted(walls), 0.99),
        f"{where}: CPU ms of a decision": 1e3 * statistics.fmean(cpus),
    }


def at_a_gateway(num_rankings: int) -> dict[str, float]:
    """Measure the ranking of a gateway that cannot reach its master.

    Such a gateway ranks by its own open legs and does not know prefixes.
    """
    rankings = {size: _local_ranking(size) for size in (RTP, 10_000)}
    times: dict[int, list[float]] = {size: [] for size in rankings}
    for _ in range(num_rankings):
        for size, ranking in rankings.items():
            began = time.thread_time()
            plan = ranking.rank(LocalQuery("m"), lambda instance_id, incarnation: 0)
            times[size].append(1e3 * (time.thread_time() - began))
            assert plan.prefills
            assert plan.decodes
    found: dict[str, float] = {}
    for size, each in times.items():
        where = f"gateway without a master, {size:,} instances"
        found[f"{where}: CPU ms of a ranking, p50"] = quantile(sorted(each), 0.5)
        found[f"{where}: p99"] = quantile(sorted(each), 0.99)
    few, many = (quantile(sorted(each), 0.5) for each in times.values())
    found["gateway without a master: 10,000 / 1,250 instances, p50"] = many / few
    return found


def _local_ranking(size: int) -> LocalRanking:
    ranking, num_prefills = LocalRanking("", "gateway-0"), round(_RTP_PREFILLS * size)
    ranking.see(
        LocalInstance(f"{role.value}-{i}", 1, role, "m", "default", "g0", "g0/f", "")
        for role, num in ((Role.PREFILL, num_prefills), (Role.DECODE, size - num_prefills))
        for i in range(num)
    )
    return ranking
