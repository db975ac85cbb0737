"""Which models vLLM's rotation for CPUs computes wrongly, and what they use instead.

vLLM 0.32's CPU kernel takes queries of [tokens, heads * size] and turns row i by position i. Models
that hand it [tokens, heads, size] have tokens * heads rows: the first `tokens` of them are turned
by wrong positions, and the others stay as they are. So an answer depends on its place in a batch.
vLLM's operation in PyTorch takes both shapes.
"""

from __future__ import annotations

from typing import Any, Final

ROTATION: Final = "rotary_embedding"  # vLLM's name of the operation
_CONVOLUTION: Final = "conv"


def rotate_rightly(config: Any) -> None:
    """On a CPU, make such a model use PyTorch's operation, unless `engine_args` choose one.

    Any: vLLM's `VllmConfig`, which is no stable type. It is changed before any process has it.
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
    """Whether it hands over [tokens, heads, size]: DeepSeek's models, and LFM2 with its experts."""
    facts = model.hf_text_config
    is_latent = bool(model.use_mla) or getattr(facts, "kv_lora_rank", None) is not None
    return is_latent or _CONVOLUTION in (getattr(facts, "layer_types", None) or ())
