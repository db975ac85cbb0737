"""Simulates a mesh of thousands of instances: groups in regions that share one scenario.

It runs on the virtual clock. Every plan is the product's own: `core.placement` ranks the instances
of all groups in the request's region.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from loadtests.sim.mesh import MeshShape, VirtualMesh
from loadtests.traffic.workloads import Arrival, block_name
from pdmesh.core.instance.admission import Work
from pdmesh.core.model import Role
from pdmesh.core.placement.baselines import POLICIES
from pdmesh.core.placement.policies import Weights
from pdmesh.engine.step_time_laws import MOCKER

NUM_REGIONS: Final = 3
NUM_GROUPS: Final = 100
_BLOCK: Final = 1024  # tokens
_PROMPT_BLOCKS: Final = (64, 192)  # RTP-LLM's prompts have 200,000 tokens
_SHARED_BLOCKS: Final = 32
_NUM_PREFIXES: Final = 500
_OUTPUT: Final = 1000


@dataclass(frozen=True, slots=True)
class Clocked:
    """The results of one run.

    `virtual_s` is the time in which requests arrive. `cpu_s` is the CPU of the whole run, until the
    last answer. So their ratio is that of a steady load. `home` is the share of requests that were
    served in their own region. `busy` is the share of prefills that had a prompt at the last
    arrival.
    """

    num_instances: int
    is_shortlisted: bool
    rate: float
    num_requests: int
    num_answered: int
    virtual_s: float
    cpu_s: float
    plan_cpu_ms: float
    ttft_mean_s: float
    ttft_p99_s: float
    reuse: float
    home: float
    busy: float

    @property
    def factor(self) -> float:
        """Virtual seconds per CPU second."""
        return self.virtual_s / self.cpu_s


class ScaleMesh(VirtualMesh):
    """A mesh whose groups have three prefills for every two decodes, like RTP-LLM's 750 and 500."""

    def __init__(self, num_instances: int, *, is_shortlisted: bool = True) -> None:
        shape = MeshShape(MOCKER, block_size=_BLOCK, num_blocks=1024)
        super().__init__(shape, "default", 1, Weights())
        if not is_shortlisted:
            self.placement.policy = replace(POLICIES["default"](), most_scored=0)
        self.plan_cpu_s = 0.0
        size = num_instances // NUM_GROUPS
        for group in range(NUM_GROUPS):
            for number in range(size):
                role = Role.PREFILL if number < round(0.6 * size) else Role.DECODE
                region = f"region-{group % NUM_REGIONS}"
                name = f"{region}/g{group}/{role.value}-{number}"
                self.add(name, role, f"g{group}", region=region)

    def region_of(self, arrival: Arrival) -> str:
        return arrival.chat_id

    def _plan(self, life: object, ask: object) -> None:
        began = time.thread_time()
        super()._plan(life, ask)  # type: ignore[arg-type]
        self.plan_cpu_s += time.thread_time() - began


def arrivals(rate: float, num_requests: int) -> Iterator[Arrival]:
    """Requests at Poisson times, in random regions. Each shares its first 32 blocks with others."""
    rng, now = random.Random(7), 0.0
    for number in range(num_requests):
        now += rng.expovariate(rate)
        prefix, length = rng.randrange(_NUM_PREFIXES), rng.randint(*_PROMPT_BLOCKS)
        blocks = [block_name(prefix, part) for part in range(_SHARED_BLOCKS)]
        blocks += [
            block_name(_NUM_PREFIXES + number, part) for part in range(_SHARED_BLOCKS, length)
        ]
        region = f"region-{rng.randrange(NUM_REGIONS)}"
        yield Arrival(now, length * _BLOCK, _OUTPUT, tuple(blocks), chat_id=region)


def run(num_instances: int, rate: float, num_requests: int, *, is_shortlisted: bool) -> Clocked:
    mesh = ScaleMesh(num_instances, is_shortlisted=is_shortlisted)
    asked = list(arrivals(rate, num_requests))
    for number, arrival in enumerate(asked):
        mesh.clock.at(arrival.at_s, partial(mesh.submit, number, arrival))
    num_busy = 0

    def look() -> None:
        nonlocal num_busy
        num_busy = sum(
            w.work is Work.PREFILL and w.admission.num_slots_used > 0 for w in mesh.workers.values()
        )

    mesh.clock.at(asked[-1].at_s, look)
    began = time.process_time()
    mesh.clock.run()
    cpu_s = time.process_time() - began
    num_prefills = sum(w.work is Work.PREFILL for w in mesh.workers.values())
    served = [s for s in mesh.served if s.e2e_s < float("inf")]
    ttfts = sorted(s.ttft_s for s in served)
    at_home = sum(s.prefill_id.startswith(s.arrival.chat_id) for s in served)
    return Clocked(
        num_instances,
        is_shortlisted,
        rate,
        num_requests,
        len(served),
        asked[-1].at_s,
        cpu_s,
        1e3 * mesh.plan_cpu_s / num_requests,
        sum(ttfts) / len(ttfts),
        ttfts[int(0.99 * len(ttfts))],
        sum(s.num_cached_tokens for s in served) / sum(a.num_prompt_tokens for a in asked),
        at_home / len(served),
        num_busy / num_prefills,
    )
