"""Decides which of vLLM's arguments an operator may set.

An operator sets vLLM's arguments with the setting `engine_args` if the mesh has no setting for
them. Some arguments are refused because the mesh depends on their values: which model is served,
how KV is laid out and moved, and how requests are scheduled. vLLM's own parser checks names and
values (`engine/vllm/child/extra_arguments.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

EngineArgs = Mapping[str, object]
"""vLLM's arguments by name. Values have JSON types. A number or a flag may also be text."""

_USE: Final = {  # for each argument, the setting of the mesh to use instead
    "model": "model_dir",
    "served_model_name": "model",
    "dtype": "dtype",
    "kv_cache_dtype": "kv_cache_dtype",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "block_size": "block_size",
    "max_model_len": "max_model_len",
    "max_num_seqs": "num_slots",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "data_parallel_size": "dp_size of the service (docs/groups.md)",
    "async_scheduling": "async_scheduling",
    "scheduling_policy": "scheduling_policy",
    "speculative_config": "speculation",
    "enable_lora": "enable_lora",
    "max_loras": "max_loras",
    "max_lora_rank": "max_lora_rank",
    "max_cpu_loras": "max_loras",
    "convert": "pooling_convert",
    "tool_parser": "TOOL_PARSER of the gateways",
    "reasoning_parser": "REASONING_PARSER of the gateways",
}
_OWNED: Final = frozenset(
    {
        "additional_config", "code_revision", "config", "disable_log_stats",
        "distributed_executor_backend", "ec_manager_config", "ec_transfer_config",
        "enable_log_requests", "enable_prefix_caching", "enable_prompt_embeds",
        "generation_config", "help", "hf_token", "kv_events_config", "kv_offloading_backend",
        "kv_offloading_size", "kv_sharing_fast_prefill", "kv_transfer_config",
        "limit_mm_per_prompt", "master_addr", "master_port", "max_num_active_seqs",
        "max_num_queued_reqs", "max_num_queued_tokens", "mm_encoder_only",
        "mm_processor_cache_gb", "nnodes", "node_rank", "override_generation_config",
        "prefix_caching_hash_algo", "reasoning_config",
        "reasoning_parser_plugin", "revision", "runner", "scheduler_cls",
        "seed", "skip_tokenizer_init", "stream_interval", "structured_outputs_config",
        "tokenizer", "tokenizer_revision", "weight_transfer_config", "worker_cls",
        "worker_extension_cls",
    }
)  # fmt: skip
_OWNED_PARTS: Final = ("data_parallel", "context_parallel", "elastic_ep", "spec_", "sleep_mode")


def refusal(name: str) -> str | None:
    """Why an operator may not set this argument. None if it is allowed."""
    if name in _USE:
        return f"the mesh sets it: use {_USE[name]} instead"
    if name in _OWNED or any(part in name for part in _OWNED_PARTS):
        return "the mesh sets it, and depends on it"
    return None
