"""Simulates `loadtests.users` on the virtual clock: users in a closed loop.

It also shows how the queues would perform if they were reported at other intervals. Gateway and
network are a constant per hop here. The cores are the services' own. So two variants differ only in
how requests wait.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Final

from loadtests.sim.mesh import MeshShape, Served, VirtualMesh
from loadtests.traffic.loops import Answer
from loadtests.traffic.workloads import Arrival
from loadtests.users.plan import (
    BLOCK_SIZE,
    DECODE_SLOTS,
    LAW,
    MEAN_PREFILL_S,
    NUM_DECODE,
    NUM_PREFILL,
    NUM_TOKENS,
    PREFIX_TOKENS,
    QUEUES,
    Prompts,
    Variant,
    thinking,
)
from pdmesh.core.placement.baselines import ShortestQueue
from pdmesh.core.placement.plan import Plan, RankedInstance
from pdmesh.core.placement.policies import Weights
from pdmesh.engine.sim.config import CHUNK_TOKENS

# as in a mesh of processes on two cores: 5 ms of TTFT in addition to the law
_HOP_S: Final = 0.0015
_TOKEN_S: Final = MEAN_PREFILL_S / (NUM_TOKENS - statistics.mean(PREFIX_TOKENS))


class UsersMesh(VirtualMesh):
    """A mesh with `num_users` users until `until`. Times are in seconds.

    Each user sends a request, reads the answer or the refusal, thinks, and begins again.
    """

    def __init__(
        self,
        variant: Variant,
        num_users: int,
        *,
        slo_s: float,
        think_s: float,
        until: float,
        report_s: float | None = None,
        seed: int = 1,
    ) -> None:
        """`report_s` is the time between two reports of the queues. The policy's default is 100
        ms.
        """
        shape = MeshShape(
            LAW,
            num_prefill=NUM_PREFILL,
            num_decode=NUM_DECODE,
            num_blocks=4096,
            block_size=BLOCK_SIZE,
            prefill_slots=variant.prefill_slots,
            decode_slots=DECODE_SLOTS,
            chunk_tokens=CHUNK_TOKENS,
            hop_s=_HOP_S,
            ttft_slo_s=slo_s,
        )
        super().__init__(shape, variant.policy, seed, Weights())
        if report_s is not None:
            queues = ShortestQueue(report_s)
            self.placement.policy = replace(self.placement.policy, score_prefills=queues)
        self._next, self._think, self._until = Prompts(seed), thinking(seed, think_s), until
        self._num_asked = 0
        self._is_told_by_reports = variant.policy == QUEUES.policy
        # by id of the request: its result, and when token 1 was expected
        self._expected: dict[int, tuple[Served, float]] = {}
        for _ in range(num_users):
            self.clock.after(self._think(), self._ask)

    def ended(self, served: Served) -> None:
        self.clock.after(self._think(), self._ask)

    def placed(self, served: Served, plan: Plan) -> None:
        """Record when token 1 is expected, at the first time that a request is placed.

        The estimate comes from the reports of queues, or from the master's bookings of planned
        work.
        """
        best = plan.prefills[0]
        due = self.fleet.instances[best.instance_id].available_at
        if self._is_told_by_reports:
            due = self.clock.now + _by_report_s(best, served.arrival)
        self._expected.setdefault(id(served), (served, due))

    def estimate_error_s(self, since: float) -> float:
        """The mean error of the estimated times of first tokens (S7).

        It is over all answered requests from `since` on.
        """
        return statistics.mean(
            abs(served.arrival.at_s + served.ttft_s - due)
            for served, due in self._expected.values()
            if served.arrival.at_s >= since and not served.is_refused
        )

    def answers(self, since: float) -> list[Answer]:
        """The answers to requests from `since` on, in the form that the generator of real load
        uses.
        """
        self.clock.run()
        return [_answer(s, since) for s in self.served if s.arrival.at_s >= since]

    def _ask(self) -> None:
        if self.clock.now < self._until:
            self._num_asked += 1
            self.submit(self._num_asked, replace(self._next(), at_s=self.clock.now))


def _by_report_s(best: RankedInstance, arrival: Arrival) -> float:
    """The expected time until token 1 behind all tokens in the queue's last report.

    The score of the policy contains the number of these tokens.
    """
    num_before = -best.score * BLOCK_SIZE
    return (num_before + arrival.num_prompt_tokens - best.num_matched_tokens) * _TOKEN_S


def _answer(served: Served, since: float) -> Answer:
    arrival = served.arrival
    return Answer(
        arrival,
        arrival.at_s - since,
        status=429 if served.is_refused else 200,
        ttft_s=served.ttft_s,
        e2e_s=served.e2e_s,
        num_tokens=0 if served.is_refused else arrival.num_output_tokens,
        num_cached_tokens=served.num_cached_tokens,
    )
