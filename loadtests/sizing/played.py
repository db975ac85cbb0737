"""Simulates a planned deployment on the virtual mesh, with the plan's laws and the product's
cores.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from loadtests.harness.results import quantile
from loadtests.sim.mesh import MeshShape, Served, VirtualMesh
from loadtests.traffic.workloads import Arrival, block_name
from pdmesh.core.placement.policies import Weights
from pdmesh.core.sizing.deployment import HOP_S, Deployment, held_by, most_running
from pdmesh.core.sizing.search import Workload
from pdmesh.core.sizing.traffic import BLOCK, Traffic

NUM_REQUESTS: Final = 2000
LIVES: Final = 5  # a run lasts at least as long as so many mean answers in a row
_WARM: Final = 0.15  # the first requests, which come at half the rate and fill the caches
# The shares of the requests that do not count, at the beginning and at the end.
_LEFT_OUT: Final = 0.35
_LAST: Final = 0.05
_TEMPLATES: Final = 4  # how many different beginnings of prompts are cached


@dataclass(frozen=True, slots=True)
class Times:
    """What requests saw in the middle of a run.

    `kept` is the share of requests that kept a goal, for the goal with the lowest share.
    """

    ttft_p50_s: float
    ttft_s: float
    tpot_p50_s: float
    tpot_s: float
    kept: float


def arrivals(traffic: Traffic, num_requests: int, seed: int) -> list[Arrival]:
    """Poisson arrivals with lengths sampled from the traffic.

    The cached part of a prompt is a beginning that prompts share. The rest has no block names,
    since no other prompt has it.
    """
    rng = random.Random(seed)
    longest = max(r.num_cached for r in traffic.requests) // BLOCK
    heads = [[block_name(-1 - t, i) for i in range(longest)] for t in range(_TEMPLATES)]
    now, made = 0.0, list[Arrival]()
    for number in range(num_requests):
        is_warm = number >= _WARM * num_requests
        now += rng.expovariate(traffic.rate_per_s * (1.0 if is_warm else 0.5))
        request = rng.choice(traffic.requests)
        template = rng.randrange(_TEMPLATES)
        shared = tuple(heads[template][: request.num_cached // BLOCK])
        made.append(Arrival(now, request.num_prompt, request.num_output, shared))
    return made


def mesh_shape(deployment: Deployment, traffic: Traffic) -> MeshShape:
    held = held_by(traffic)
    last = deployment.pools[-1]
    shape = MeshShape(
        deployment.pools[0].kind.law,
        num_blocks=deployment.pools[0].kind.kv_tokens // BLOCK,
        block_size=BLOCK,
        chunk_tokens=deployment.pools[0].chunk,
        decode_slots=most_running(last.kind, held),
        hop_s=HOP_S,
        ttft_slo_s=1e6,
    )
    if deployment.is_fusion:
        return replace(shape, num_fusion=last.count)
    prefill, decode = deployment.pools
    rate = min(prefill.kind.network_bandwidth, decode.kind.network_bandwidth)
    return replace(
        shape,
        num_prefill=prefill.count,
        num_decode=decode.count,
        prefill_slots=prefill.slots,
        decode_law=decode.kind.law,
        decode_blocks=decode.kind.kv_tokens // BLOCK,
        transfer_token_s=prefill.kind.kv_token_bytes / rate,
    )


def num_requests(deployment: Deployment, wanted: Workload) -> int:
    """The number of requests of a run: enough for the quantile, and for several answers in a
    row.
    """
    life_s = wanted.traffic.mean_output * wanted.goals.tpot_s
    return max(NUM_REQUESTS, math.ceil(LIVES * life_s * wanted.traffic.rate_per_s))


def play(deployment: Deployment, wanted: Workload, seed: int) -> Times:
    mesh = VirtualMesh(mesh_shape(deployment, wanted.traffic), "default", seed, Weights())
    mesh.run(arrivals(wanted.traffic, num_requests(deployment, wanted), seed))
    first, last = int(_LEFT_OUT * len(mesh.served)), int((1 - _LAST) * len(mesh.served))
    return times_of(mesh.served[first:last], wanted)


def times_of(served: list[Served], wanted: Workload) -> Times:
    goals = wanted.goals
    ttft = sorted(s.ttft_s for s in served)
    tpot = sorted(s.tpot_s for s in served if s.arrival.num_output_tokens > 1)
    kept = min(
        sum(each <= goals.ttft_s for each in ttft) / len(ttft),
        sum(each <= goals.tpot_s for each in tpot) / len(tpot),
    )
    return Times(
        quantile(ttft, 0.5), quantile(ttft, goals.share),
        quantile(tpot, 0.5), quantile(tpot, goals.share), kept,
    )  # fmt: skip


def keeps(deployment: Deployment, wanted: Workload, seed: int) -> bool:
    return play(deployment, wanted, seed).kept >= wanted.goals.share


def highest(holds: Callable[[float], bool], start: float, precision: float = 0.05) -> float:
    """The highest rate for which `holds` is true; 0 if it is below a twentieth of `start`.

    Steps of 20 % from `start` find an interval. The interval is then halved until it is within
    `precision`.
    """
    low = high = start
    if holds(start):
        while holds(high := 1.2 * low):
            low = high
    else:
        while not holds(low := high / 1.2):
            high = low
            if high < start / 20:
                return 0.0
    while high - low > precision * high:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return (low + high) / 2
