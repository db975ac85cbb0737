"""Replaces vLLM's rotary embedding for CPUs in models for which its kernel is wrong.

vLLM 0.32's CPU kernel takes queries of [tokens, heads * size], and applies the rotary embedding of
position i to row i. Some models pass [tokens, heads, size], which has tokens * heads rows. Then the
kernel uses wrong positions for the first `tokens` of them, and leaves the others unchanged. So an
answer depends on its place in a batch. vLLM's operation in PyTorch takes both shapes.
"""

from __future__ import annotations

from typing import Any, Final

ROTATION: Final = "rotary_embedding"  # vLLM's name of the operation
_CONVOLUTION: Final = "conv"


def rotate_rightly(config: Any) -> None:
    """On a CPU, make such a model use PyTorch's operation, unless `engine_args` choose one.

    Any: vLLM's `VllmConfig`, which is no stable type. It is changed before any process gets it.
    """
    operations: list[str] = config.compilation_config.custom_ops
    is_chosen = any(each[1:] == ROTATION for each in operations)
    if config.device_config.device_type != "cpu" or is_chosen:
        return
    if rotates_by_head(config.model_config):
        operations.append(f"-{ROTATION}")


def rotation_text(config: Any) -> list[str]:
    """What a fingerprint says of the rotation, where the kernel and PyTorch give different KV."""
    if config.device_config.device_type != "cpu" or not rotates_by_head(config.model_config):
        return []
    is_right = f"-{ROTATION}" in config.compilation_config.custom_ops
    return ["rotation by head" if is_right else "rotation by vLLM's kernel"]


def rotates_by_head(model: Any) -> bool:
    """Whether it may pass [tokens, heads, size]: with latent attention or convolutions (LFM2)."""
    facts = model.hf_text_config
    is_latent = bool(model.use_mla) or getattr(facts, "kv_lora_rank", None) is not None
    return is_latent or _CONVOLUTION in (getattr(facts, "layer_types", None) or ())
