"""Replaces vLLM's rotary embedding for CPUs in models for which its kernel is wrong.

vLLM 0.32's CPU kernel takes queries of [tokens, heads * size], and applies the rotary embedding of
position i to row i. Some models pass [tokens, heads, size], which has tokens * heads rows. The
kernel then uses wrong positions for the first `tokens` rows, and leaves the other rows unchanged.
So an answer depends on its place in a batch. vLLM's operation in PyTorch takes both shapes.
"""

from __future__ import annotations

from typing import Any, Final

ROTATION: Final = "rotary_embedding"  # vLLM's name of the operation
_CONVOLUTION: Final = "conv"


def rotate_rightly(config: Any) -> None:
    """On a CPU, let an affected model use PyTorch's operation, unless `engine_args` choose one.

    `config` is vLLM's `VllmConfig`, which is no stable type. Call this before `config` is passed to
    any process.
    """
    operations: list[str] = config.compilation_config.custom_ops
    is_chosen = any(each[1:] == ROTATION for each in operations)
    if config.device_config.device_type != "cpu" or is_chosen:
        return
    if rotates_by_head(config.model_config):
        operations.append(f"-{ROTATION}")


def rotation_text(config: Any) -> list[str]:
    """The rotation's part in the fingerprint, which must be equal in engines that exchange KV.

    Empty where the kernel and PyTorch give equal KV.
    """
    if config.device_config.device_type != "cpu" or not rotates_by_head(config.model_config):
        return []
    is_right = f"-{ROTATION}" in config.compilation_config.custom_ops
    return ["rotation by head" if is_right else "rotation by vLLM's kernel"]


def rotates_by_head(model: Any) -> bool:
    """Whether the model may pass [tokens, heads, size].

    Models with latent attention or convolutions (LFM2) may do this.
    """
    facts = model.hf_text_config
    is_latent = bool(model.use_mla) or getattr(facts, "kv_lora_rank", None) is not None
    return is_latent or _CONVOLUTION in (getattr(facts, "layer_types", None) or ())
