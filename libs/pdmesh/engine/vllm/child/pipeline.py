"""Refuses settings that cannot be combined with a pipeline, before vLLM's processes start.

The stages of a pipeline have different layers of the model. vLLM plans a step while earlier steps
are still on their way through the stages.
"""

from __future__ import annotations

from typing import Any

from pdmesh.engine.vllm.config import VllmConfig
from pdmesh.engine.vllm.connector.kv_facts import layers_by_stage
from pdmesh.errors import EngineMisconfigured


def check_pipeline(config: VllmConfig) -> None:
    """Raises EngineMisconfigured for speculation, and for a model that reads images.

    With speculation, an engine proposes tokens and checks them in one step. In a pipeline, vLLM
    0.32 plans further steps before it knows which of these tokens were right
    (`EngineCore.post_step`), and then computes wrong tokens.
    """
    if config.pipeline_parallel_size == 1:
        return
    if config.speculation.max_tokens:
        raise refused(
            config.pipeline_parallel_size,
            "cannot be combined with speculation: vLLM 0.32 "
            "plans a step before it knows which proposed tokens were right",
        )
    if config.has_vision:
        raise refused(
            config.pipeline_parallel_size,
            "cannot be combined with a model that reads images: no test covers this",
        )


def check_stages(vllm_config: Any) -> None:
    """Raises EngineMisconfigured if the layers cannot be split into the stages.

    `vllm_config` is vLLM's own, of no stable type.
    """
    try:
        stages = layers_by_stage(vllm_config)
    except ValueError as error:
        raise EngineMisconfigured(f"VLLM_PP_LAYER_PARTITION: {error}") from error
    if stages and min(stages) < 1:
        raise refused(len(stages), f"is too many stages for a model of {sum(stages)} layers")


def refused(num_stages: int, problem: str) -> EngineMisconfigured:
    field = "pipeline_parallel_size"
    message = f"{field}: {num_stages} {problem} (docs/gpu.md)"
    return EngineMisconfigured(message, reason="BAD_OPTION", field=field)
