"""The users' prompts and their mesh: prefixes of different lengths, and two ways to wait (S7, S45,
S62).

The plan follows P/D-Serve's example of why queues fail (section 2.2.2). The prompts of one scenario
have equal lengths. But a prefill computes more or less of a prompt, depending on the prefix that it
holds. And the lengths of queues are reported only every 100 ms. In both variants, an answer
succeeds if its first token comes within 0.5 s (S9: an SLO for each scenario). An idle prefill takes
a third of this time for a prompt.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from loadtests.traffic.workloads import Arrival, block_name
from pdmesh.engine.step_time_laws import SMOLLM2_CPU

LAW: Final = SMOLLM2_CPU
NUM_PREFILL: Final = 12
NUM_DECODE: Final = 2
# b_p; while a decode pulls a prompt's KV, the prefill computes the next one
PREFILL_SLOTS: Final = 2
QUEUE: Final = 64
DECODE_SLOTS: Final = 64
BLOCK_SIZE: Final = 64
NUM_TOKENS: Final = 768
PREFIX_TOKENS: Final = (320, 384, 448)  # on average, half of a prompt
NUM_OUTPUT: Final = 2

# Mean time of a prompt alone on a prefill that holds its prefix. Each of b_p prompts that are
# computed at once takes b_p times as long.
MEAN_PREFILL_S: Final = statistics.mean(
    LAW.prefill_s(NUM_TOKENS - prefix, prefix) for prefix in PREFIX_TOKENS
)
CAPACITY_PER_S: Final = NUM_PREFILL * PREFILL_SLOTS / (PREFILL_SLOTS * MEAN_PREFILL_S)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to wait: a placement policy, and how many prompts a prefill takes at once."""

    name: str
    policy: str
    prefill_slots: int


ON_DEMAND: Final = Variant("on demand", "default", PREFILL_SLOTS)
QUEUES: Final = Variant("queues, shortest by 100 ms reports", "shortest_queue", QUEUE)


class Prompts:
    """Makes prompts. Each has a random prefix, followed by tokens that no other prompt has."""

    def __init__(self, seed: int) -> None:
        self._rng, self._numbers = random.Random(seed), itertools.count(1)

    def __call__(self) -> Arrival:
        number, prefix_tokens = next(self._numbers), self._rng.choice(PREFIX_TOKENS)
        num_shared = prefix_tokens // BLOCK_SIZE
        names = [
            block_name(-prefix_tokens, part) if part < num_shared else block_name(number, part)
            for part in range(NUM_TOKENS // BLOCK_SIZE)
        ]
        return Arrival(0.0, NUM_TOKENS, NUM_OUTPUT, tuple(names))


def thinking(seed: int, mean_s: float) -> Callable[[], float]:
    """Random seconds that a user waits after an answer before the next question."""
    rng = random.Random(seed)
    return lambda: rng.uniform(0.5 * mean_s, 1.5 * mean_s)
