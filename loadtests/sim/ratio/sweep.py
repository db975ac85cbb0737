"""Measures the throughput of every integer ratio of a total, as P/D-Serve does (S61, S65).

Users send requests in a closed loop. Their number grows until an answer is late.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from loadtests.sim.load import Lengths
from loadtests.sim.mesh import MeshShape, Served, VirtualMesh
from loadtests.sim.profile import profile
from loadtests.traffic.workloads import Arrival
from pdmesh.core.instance.step_time_law import Law
from pdmesh.core.placement.policies import Weights
from pdmesh.core.ratio.throughput import Profile, Split
from pdmesh.engine.step_time_laws import SMOLLM2_CPU

TOTAL: Final = 8
PREFILL_SLOTS: Final = 2
DECODE_SLOTS: Final = 8
_GROWTH: Final = 1.2  # growth of the number of users from one run to the next
_PER_USER: Final = 6  # the least number of requests per user
_MIN_REQUESTS: Final = 160
_PATIENCE: Final = 3.0  # the E2E SLO, as a multiple of a request's time with full batches


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of one scenario, and the kind of instance that serves them."""

    name: str
    lengths: Lengths
    law: Law = SMOLLM2_CPU
    prefill_slots: int = PREFILL_SLOTS
    decode_slots: int = DECODE_SLOTS

    def shape(self, split: Split) -> MeshShape:
        return MeshShape(
            self.law,
            num_prefill=split.num_prefill,
            num_decode=split.num_decode,
            num_blocks=1024,
            prefill_slots=self.prefill_slots,
            decode_slots=self.decode_slots,
        )

    def profile(self) -> Profile:
        return profile(
            self.law,
            num_prompt=self.lengths.num_prompt,
            num_output=self.lengths.num_output,
            prefill_slots=self.prefill_slots,
            decode_slots=self.decode_slots,
            transfer_s=self.lengths.num_prompt * MeshShape(self.law).transfer_token_s,
        )

    def slo_s(self) -> float:
        profiled = self.profile()
        return _PATIENCE * (profiled.t_p + profiled.t_d)


WORKLOADS: Final = (
    Workload("long prompts, 2400 in, 50 out", Lengths(2400, 50)),
    Workload("balanced, 1000 in, 100 out", Lengths(1000, 100)),
    Workload("long answers, 600 in, 200 out", Lengths(600, 200)),
)


# As in the paper's scenario, one prefill carries 0.6 units and one decode 0.7. The unit here is
# requests/s.
_PAPER_LAW: Final = Law("paper", prefill_token_s=1 / 600, step_fixed_s=1 / (0.7 * 20))
_PAPER: Final = Lengths(1000, 21, spread=0.0)
PAPER: Final = Workload("P 0.6, D 0.7", _PAPER, _PAPER_LAW, 1, 1)
PAPER_LONGER: Final = Workload(
    "P 0.6, D 0.7, T_d +50 %", Lengths(1000, 31, spread=0.0), _PAPER_LAW, 1, 1
)
PAPER_SPLITS: Final = (Split(1, 1), Split(4, 1), Split(1, 4), Split(3, 2))


class ClosedLoop(VirtualMesh):
    """A mesh with `num_users` users. Each sends a new request as soon as the answer has come."""

    def __init__(self, workload: Workload, split: Split, num_users: int, seed: int) -> None:
        super().__init__(workload.shape(split), "default", seed, Weights())
        self._lengths, self._rng = workload.lengths, random.Random(seed)
        self._num_users, self._num_asked = num_users, 0
        self._num_requests = max(_MIN_REQUESTS, _PER_USER * num_users)
        self.ends: list[float] = []

    def play(self) -> None:
        """Run all users. They start one after the other, so that they are not in step."""
        for number in range(self._num_users):
            self.clock.at(0.01 * number, self._ask)
        self.clock.run()

    def ended(self, served: Served) -> None:
        self.ends.append(self.clock.now)
        self._ask()

    def _ask(self) -> None:
        if self._num_asked < self._num_requests:
            self._num_asked += 1
            num_prompt, num_output = self._lengths.draw(self._rng)
            self.submit(self._num_asked, Arrival(self.clock.now, num_prompt, num_output))

    def per_s(self) -> float:
        """Answers/s while all users were active, without the first and the last answers."""
        first, last = self._num_users, len(self.ends) - self._num_users
        if last <= first + 1:
            first = 0
        return (last - first) / (self.ends[last] - self.ends[first])


@dataclass(frozen=True, slots=True)
class Best:
    """The most answers/s of a split without a late answer, and the number of users for it.

    `e2e_s` and `t_p_s` are the means with that number of users.
    """

    workload: str
    split: Split
    seed: int
    per_s: float
    num_users: int
    e2e_s: float
    t_p_s: float
    formula_per_s: float


def best(workload: Workload, split: Split, seed: int) -> Best:
    """Add users until an answer is late, and return the run with the most answers/s.

    If one role is the bottleneck, throughput stops growing long before an answer is late.
    """
    slo_s = workload.slo_s()
    formula = workload.profile().phi(split).value * split.total
    found = Best(workload.name, split, seed, 0.0, 0, 0.0, 0.0, formula)
    num_users = 1
    while True:
        mesh = ClosedLoop(workload, split, num_users, seed)
        mesh.play()
        if any(s.is_refused or s.e2e_s > slo_s for s in mesh.served):
            return found
        per_s = mesh.per_s()
        if per_s > found.per_s:
            num = len(mesh.served)
            e2e_s = sum(s.e2e_s for s in mesh.served) / num
            t_p_s = sum(s.prefill_s for s in mesh.served) / num
            found = Best(workload.name, split, seed, per_s, num_users, e2e_s, t_p_s, formula)
        num_users = max(num_users + 1, int(num_users * _GROWTH))
