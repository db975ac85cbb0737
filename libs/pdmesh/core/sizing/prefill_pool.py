"""Computes the time to first token of a pool of prefills, whose prompts wait in order for an
engine.

When an engine begins a step, it takes the waiting prompts, up to its chunk. All prompts of the step
end together. Most of them end later than if they were computed one by one, but they share the
step's fixed cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.core.instance.step_time_law import Law
from pdmesh.core.sizing.queueing import QueueWait, erlang_c, quantile_of, waiting
from pdmesh.core.sizing.traffic import RequestLengths, Traffic, mean


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The time to first token of each sampled request: a wait, a service time and `base_s`.

    `services` has the time of each request after its wait. `base_s` is the time of the messages
    between the mesh's processes.
    """

    wait: QueueWait
    services: tuple[float, ...]
    base_s: float
    busy: float

    def exceeds(self, seconds: float) -> float:
        """The share of requests whose first token takes longer than `seconds`."""
        left = seconds - self.base_s
        return mean([self.wait.exceeds(left - service) for service in self.services])

    def quantile_s(self, share: float) -> float:
        return quantile_of(self.exceeds, share, self.base_s + mean(self.services))


def prompt_s(law: Law, request: RequestLengths, chunk: int) -> float:
    """The time to compute one prompt alone, in chunks."""
    num_chunks = -(-request.num_new // chunk)
    whole = law.prefill_s(request.num_new, request.num_cached)
    return whole + (num_chunks - 1) * law.prefill_fixed_s


def first_tokens(
    law: Law, traffic: Traffic, num_instances: int, chunk: int, base_s: float, slots: int
) -> FirstTokens:
    alone = [prompt_s(law, r, chunk) for r in traffic.requests]
    together = min(slots, mean_together(traffic.requests, chunk))
    busy = traffic.rate_per_s * mean(alone) / num_instances
    if together > 1 and law.prefill_fixed_s:
        busy, alone = _shared_fixed(law, traffic, num_instances, alone, together)
    if busy >= 1:
        return FirstTokens(QueueWait(1.0, math.inf), tuple(alone), base_s, busy)
    wait = waiting(num_instances, traffic.rate_per_s, alone, traffic.arrival_cv2)
    extra = batch_extra_s(mean(alone), num_instances, busy, together)
    return FirstTokens(_longer(wait, extra), tuple(alone), base_s, busy)


def mean_together(requests: Sequence[RequestLengths], chunk: int) -> float:
    """How many prompts of mean length fit into one step."""
    return chunk / mean([r.num_new for r in requests])


def batch_size(num_instances: int, busy: float, most: float) -> float:
    """The mean number of prompts in a step, from the viewpoint of a prompt.

    Prompts that arrive during a step join the next one. So batches grow and shrink like a branching
    process: each prompt of a batch brings `busy` prompts of the next batch, on average. The batch
    that a prompt sees has the size 1 / (1 - busy^2). With several engines, a prompt joins others
    only if it finds all engines in use.
    """
    if most <= 1:
        return 1.0
    joining = busy * erlang_c(num_instances, busy)
    return min(1 / max(1e-6, 1 - joining), most)


def batch_extra_s(middle_s: float, num_instances: int, busy: float, most: float) -> float:
    """For a prompt that waits, how much later its batch ends than the prompt alone would end."""
    size = batch_size(num_instances, busy, most)
    probability = erlang_c(num_instances, busy)
    return (size - 1) / 2 * middle_s / probability if probability else 0.0


def _shared_fixed(
    law: Law, traffic: Traffic, num_instances: int, alone: list[float], together: float
) -> tuple[float, list[float]]:
    """The busy share and the service times, if prompts in one step share the step's fixed cost."""
    saved = 0.0
    busy = traffic.rate_per_s * mean(alone) / num_instances
    for _ in range(20):
        # Near overload, steps are as full as the chunk allows.
        size = batch_size(num_instances, busy, together) if busy < 1 else together
        saved = law.prefill_fixed_s * (1 - 1 / size)
        busy = traffic.rate_per_s * (mean(alone) - saved) / num_instances
    return busy, [each - saved for each in alone]


def _longer(wait: QueueWait, extra_s: float) -> QueueWait:
    return QueueWait(wait.probability, wait.mean_s + extra_s)
