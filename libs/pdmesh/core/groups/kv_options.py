"""Decides whether the options of prefills and decodes let them exchange KV (S67).

The KV of a draft model, which speculation uses, travels in the same blocks as the model's KV. Some
arguments of vLLM also change the content of a block. Prefills and decodes that differ in such
options never exchange KV. Each of them computes whole requests alone, so no failed hand-over shows
the mistake to the operator.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from pdmesh.core.instance.engine_args import EngineArgs
from pdmesh.core.speculation.proposal_length import Method

_METHODS: Final = {method.value: method for method in Method}
# Arguments of vLLM that change how fast or where a model is computed, but not the KV of a text.
_SAME_KV: Final = frozenset(
    {
        "aggregate_engine_logging", "all2all_backend", "collect_detailed_traces",
        "compilation_config", "cpu_distributed_timeout_seconds", "cpu_offload_gb",
        "cpu_offload_params", "cudagraph_capture_sizes", "cudagraph_metrics",
        "dbo_decode_token_threshold", "dbo_prefill_token_threshold", "device_ids",
        "disable_custom_all_reduce", "distributed_timeout_seconds", "download_dir",
        "enable_chunked_prefill", "enable_dbo", "enable_ep_weight_filter", "enable_eplb",
        "enable_expert_parallel", "enable_mfu_metrics", "enforce_eager", "eplb_config",
        "expert_placement_strategy", "gpu_memory_utilization", "jit_monitor_mode",
        "jit_monitor_verbose", "kv_cache_metrics", "kv_cache_metrics_sample", "log_level",
        "logging_config", "logprobs_mode", "long_prefill_token_threshold",
        "max_cudagraph_capture_size", "max_logprobs", "max_num_scheduled_tokens",
        "max_parallel_loading_workers", "model_loader_extra_config", "num_gpu_blocks_override",
        "numa_bind", "numa_bind_cpus", "numa_bind_nodes", "offload_backend", "offload_group_size",
        "offload_num_in_group", "offload_params", "offload_prefetch_step", "optimization_level",
        "otlp_traces_endpoint", "performance_mode", "prefix_cache_retention_interval",
        "profiler_config", "pt_load_map_location", "safetensors_load_strategy",
        "safetensors_prefetch_block_size", "safetensors_prefetch_num_threads",
        "show_hidden_metrics_for_version", "shutdown_timeout", "tokenizer_mode",
        "trust_remote_code", "ubatch_size", "use_tqdm_on_load", "watermark",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OptionText:
    """An option of one role as JSON text, and the path of the setting that it comes from."""

    setting: str
    text: str = ""


def _draft(option: dict[str, object]) -> str:
    """The draft model whose KV is kept beside the model's KV, or empty if there is none."""
    method = _METHODS.get(str(option.get("method")))
    if method is None or not method.has_kv:
        return ""
    folder = str(option.get("model") or "")
    return f"{method.value} {PurePosixPath(folder)}" if folder else method.value


def kv_identity(args: EngineArgs) -> str:
    """The arguments that may change the KV of a text, as canonical JSON. Empty if there are none.

    Instances with different identities exchange no KV. Every argument outside `_SAME_KV` is part
    of the identity.
    """
    changing = {name: _plain(value) for name, value in args.items() if name not in _SAME_KV}
    return json.dumps(changing, sort_keys=True, separators=(",", ":")) if changing else ""


def _plain(value: object) -> object:
    """Parse a value that is text, because vLLM's parser treats `"0.5"` and 0.5 alike."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


# For each option: the name of the part that affects KV, and the function that reads this part.
_DECIDES_KV: Final[Mapping[str, tuple[str, Callable[[dict[str, object]], str]]]] = {
    "speculation": ("the draft", _draft),
    "engine_args": ("what changes KV in engine_args", kv_identity),
}
KV_OPTIONS: Final = tuple(_DECIDES_KV)


def kv_split(option: str, prefill: OptionText, decode: OptionText) -> str:
    """One line on why these prefills and decodes exchange no KV, or empty if they exchange KV."""
    what, decides = _DECIDES_KV[option]
    of_prefill, of_decode = decides(_read(prefill.text)), decides(_read(decode.text))
    if of_prefill == of_decode:
        return ""
    return (
        f"{what} of prefills is {of_prefill or 'none'} ({prefill.setting}), and that of decodes is "
        f"{of_decode or 'none'} ({decode.setting}): they exchange no KV; give both the same"
    )


def _read(text: str) -> dict[str, object]:
    """The option as an object. It is empty if the text is invalid. Instances refuse such a text."""
    try:
        option = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return option if isinstance(option, dict) else {}
