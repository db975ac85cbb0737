"""Refuses steps that are too long for models with Mamba-2 layers on a CPU.

Where a step passes a block's end, vLLM keeps the layers' state at that place, to reuse prefixes.
vLLM 0.32's Mamba-2 for CPUs returns no states within a step. The engine crashes with an IndexError
at the first prompt that is longer than a block.
"""

from __future__ import annotations

from typing import Any

from pdmesh.errors import EngineMisconfigured


def check_state_steps(config: Any) -> None:
    """Raises EngineMisconfigured, which names the setting. `config` is vLLM's `VllmConfig`."""
    block_size = config.cache_config.block_size
    step_tokens = config.scheduler_config.max_num_batched_tokens
    if config.device_config.device_type != "cpu" or step_tokens <= block_size:
        return
    if keeps_mamba2_states(config.model_config):
        name = config.model_config.served_model_name
        num_slots = config.scheduler_config.max_num_seqs
        field = "max_num_batched_tokens" if num_slots <= block_size else "num_slots"
        also = "" if field == "max_num_batched_tokens" else " (each slot takes a token of a step)"
        raise EngineMisconfigured(
            f"{name} has Mamba-2 layers, which vLLM computes on a CPU only in steps of one block: "
            f"set {field} to {block_size} at most{also}, or to the larger block_size that the "
            f"model needs; steps have {step_tokens} tokens now (docs/cache-kinds.md)",
            reason="BAD_OPTION",
            field=field,
        )


def keeps_mamba2_states(model: Any) -> bool:
    """Whether the model has Mamba-2 layers. Their chunk size is in its configuration."""
    facts = model.hf_text_config
    names = ("mamba_chunk_size", "chunk_size")
    return bool(model.has_inner_state) and any(getattr(facts, name, None) for name in names)
