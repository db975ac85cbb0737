"""The configuration of a pooling vLLM, and how it becomes vLLM's arguments.

A pooling engine makes vectors or scores of whole texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdmesh.core.instance.async_scheduling import AsyncScheduling, Decision, Schedules, decide
from pdmesh.core.instance.engine_args import EngineArgs
from pdmesh.core.loading.weights_loader import LoaderChoice, WeightsLoader
from pdmesh.engine.vllm.config import CPU_STEP_TOKENS, MEMORY_SHARE, installed_device
from pdmesh.engine.vllm.loading.choice import loader_arguments, loader_choice


@dataclass(frozen=True, slots=True)
class VllmPoolingConfig:
    """The engine of one instance. The model may allow fewer tokens than `max_model_len`."""

    instance_id: str
    incarnation: int
    model_dir: Path
    model: str  # the name that clients use
    device: str = field(default_factory=installed_device)  # cpu or cuda
    dtype: str = ""  # empty: float32 on a CPU, the model's on a GPU
    kv_cache_dtype: str = "auto"
    convert: str = "auto"  # how to use a model that is made for answers: embed or classify
    tensor_parallel_size: int = 1
    kv_cache_bytes: int = 512 << 20
    max_model_len: int = 4096
    weights_loader: WeightsLoader = WeightsLoader.AUTO
    engine_args: EngineArgs = field(default_factory=dict)  # more of vLLM's arguments
    max_num_batched_tokens: int = 0  # per step; 0: our default on a CPU, vLLM's on a GPU
    # SHA-256 of the model's files by name, if they were verified before the engine is built.
    file_digests: Mapping[str, str] = field(default_factory=dict)
    failpoints: str = ""

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size

    @property
    def effective_dtype(self) -> str:
        return self.dtype or ("float32" if self.device == "cpu" else "auto")

    @property
    def scheduling(self) -> Decision:
        """Steps of a pooling model are always scheduled one after the other."""
        return decide(AsyncScheduling.AUTO, Schedules(self.device, is_pooling=True))

    @property
    def loader(self) -> LoaderChoice:
        return loader_choice(self.weights_loader, self.model_dir)

    @property
    def has_worker_process(self) -> bool:
        return self.tensor_parallel_size > 1

    def step_tokens(self, max_model_len: int, *, is_chunked: bool) -> int:
        """The most tokens that a step computes. 0 is vLLM's choice.

        A model whose inputs cannot be computed in parts needs steps as long as its longest input.
        """
        asked = self.max_num_batched_tokens or (CPU_STEP_TOKENS if self.device == "cpu" else 0)
        return max(asked, max_model_len) if asked and not is_chunked else asked


def pooling_arguments(config: VllmPoolingConfig) -> dict[str, Any]:
    """Keyword arguments of `AsyncEngineArgs`, without the arguments that `fitted` adds.

    vLLM mixes their types, hence Any.
    """
    arguments: dict[str, Any] = {
        "model": str(config.model_dir),
        "served_model_name": [config.model],
        "runner": "pooling",
        "convert": config.convert,
        "skip_tokenizer_init": True,
        "dtype": config.effective_dtype,
        "enforce_eager": config.device == "cpu",  # a compiled start takes minutes there
        "gpu_memory_utilization": MEMORY_SHARE,
        "kv_cache_memory_bytes": config.kv_cache_bytes or None,
        "tensor_parallel_size": config.tensor_parallel_size,
        "use_tqdm_on_load": False,
        "disable_log_stats": True,
        "async_scheduling": config.scheduling.is_async,
        **loader_arguments(config.loader),
    }
    if config.tensor_parallel_size == 1:
        arguments["distributed_executor_backend"] = "uni"
    return arguments


def fitted(config: VllmPoolingConfig, arguments: dict[str, Any]) -> dict[str, Any]:
    """Adds `max_model_len`, the longest input that is allowed, and the most tokens of a step.

    This call blocks, because vLLM reads the model's files. Raises ValueError, OSError and other
    errors of vLLM.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    model = AsyncEngineArgs(**arguments).create_model_config()
    max_model_len = min(config.max_model_len, model.max_model_len)
    step_tokens = config.step_tokens(max_model_len, is_chunked=model.is_chunked_prefill_supported)
    steps = {"max_num_batched_tokens": step_tokens} if step_tokens else {}
    return {**arguments, "max_model_len": max_model_len, **steps}
