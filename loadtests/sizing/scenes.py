"""The workloads for which plans are checked.

Each has a model (by its config.json), lengths, goals, a light load and a heavy load. Lengths are
lognormal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pdmesh.core.sizing.accelerators import accelerator
from pdmesh.core.sizing.instance_kind import kinds_of
from pdmesh.core.sizing.model_shape import model_shape
from pdmesh.core.sizing.search import Workload
from pdmesh.core.sizing.traffic import Goals, traffic_of

# Only the fields of each config.json that decide about time and memory.
CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "Llama-3.1-8B": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "Llama-3.1-70B": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
        "num_hidden_layers": 80, "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "Qwen3-32B": {
        "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64, "head_dim": 128,
        "num_hidden_layers": 64, "num_key_value_heads": 8, "vocab_size": 151936,
    },
    "Qwen3-30B-A3B": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "head_dim": 128,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "vocab_size": 151936,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scene:
    """A workload. `rates` are the light and the heavy load, in requests/s. Goals are in seconds."""

    name: str
    model: str
    gpu: str
    prompt: str
    answer: str
    cached_share: float
    ttft_s: float
    tpot_s: float
    rates: tuple[float, float]

    def wanted(self, rate_per_s: float, least: int = 1) -> Workload:
        kinds = kinds_of(model_shape(CONFIGS[self.model]), accelerator(self.gpu), (1, 2, 4, 8))
        traffic = traffic_of(rate_per_s, self.prompt, self.answer, self.cached_share)
        return Workload(traffic, Goals(self.ttft_s, self.tpot_s), tuple(kinds), least)


SCENES: Final = (
    Scene(
        "short chat", "Llama-3.1-8B", "h100", "mean=500,p99=3000", "mean=200,p99=800", 0.0,
        0.5, 0.02, (20.0, 200.0),
    ),
    Scene(
        "long prompts", "Llama-3.1-70B", "h100", "mean=6000,p99=24000", "mean=300,p99=1000", 0.0,
        4.0, 0.05, (1.0, 10.0),
    ),
    Scene(
        "long prompts (strict)", "Llama-3.1-70B", "h100", "mean=6000,p99=24000",
        "mean=300,p99=1000", 0.0, 4.0, 0.025, (1.0, 10.0),
    ),
    Scene(
        "reasoning", "Qwen3-32B", "h200", "mean=1000,p99=4000", "mean=3000,p99=10000", 0.0,
        2.0, 0.03, (0.5, 6.0),
    ),
    Scene(
        "agents", "Llama-3.1-70B", "h200", "mean=12000,p99=40000", "mean=250,p99=1000", 0.85,
        2.0, 0.03, (2.0, 16.0),
    ),
    Scene(
        "mixture of experts", "Qwen3-30B-A3B", "h100", "mean=2000,p99=8000", "mean=300,p99=1000",
        0.3, 1.0, 0.02, (5.0, 80.0),
    ),
)  # fmt: skip
