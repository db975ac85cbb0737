"""Refuses the setting that gives each rank whole experts, if the engine runs on a CPU (S122)."""

from __future__ import annotations

from typing import Any

from pdmesh.errors import EngineMisconfigured


def check_experts(vllm_config: Any) -> None:
    """Raises EngineMisconfigured. `vllm_config` is vLLM's own, of no stable type.

    vLLM 0.32 accepts the setting. But vLLM's kernel for CPUs uses an expert's global number as an
    index into the rank's own experts, and reads past their end. A rank then crashes with a
    segmentation fault in its first step. vLLM without pdmesh crashes in the same way.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    is_shared_out = parallel.enable_expert_parallel and model.is_moe and parallel.world_size > 1
    if is_shared_out and vllm_config.device_config.device_type == "cpu":
        field = "engine_args.enable_expert_parallel"
        raise EngineMisconfigured(
            f"{field}: on a CPU, vLLM 0.32 fails in its first step with experts that are shared "
            "out over ranks; leave it out, and each rank holds a part of every expert",
            reason="BAD_OPTION",
            field=field,
        )
