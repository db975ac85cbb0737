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


def rotates_by_head(model: Any) -> bool:
    """Whether it hands over [tokens, heads, size]: latent attention, and LFM2 with its experts."""
    kinds = getattr(model.hf_text_config, "layer_types", None) or ()
    return bool(model.use_mla) or _CONVOLUTION in kinds
