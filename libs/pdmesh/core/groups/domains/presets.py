"""Named combinations of tensor and data parallelism that are proven in production (RTP-LLM 8.3).

Table 6 of RTP-LLM compares four decode configurations of a 235B mixture of experts with the same
number of GPUs. An operator may choose a configuration by its use, such as "latency", instead of by
its numbers (S134).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class ParallelPreset:
    """One configuration of a group's members.

    `tensor_parallel_size` is the number of devices of each rank. `dp_size` is the number of ranks
    of a data-parallel domain, which is one member of a group.
    """

    tensor_parallel_size: int
    dp_size: int
    use: str


PRESETS: Final[Mapping[str, ParallelPreset]] = MappingProxyType(
    {
        "low-concurrency": ParallelPreset(
            4, 1, "the shortest time per token up to 64 requests at once: members of 4 TP, no DP"
        ),
        "latency": ParallelPreset(
            1, 8, "online serving: the shortest time per token from 128 to 512 requests at once"
        ),
        "throughput": ParallelPreset(2, 4, "offline batches: the most tokens per GPU"),
        "unified": ParallelPreset(2, 8, "one shape for prefill and decode"),
    }
)
