"""Allocates a pipeline stage's memory for the inputs from the stage before it, on a CPU.

vLLM 0.32's older model runner allocates this memory when it profiles a model. On a CPU, vLLM does
not profile a model that runs eagerly with a given size of its KV cache. Without the memory, the
last stage reports that it computed no request, and the engine fails in its first step.
"""

from __future__ import annotations

import functools
from typing import Any


def make_room_for_inputs() -> None:
    """Patch the model runner of this process. Idempotent."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    gather = GPUModelRunner.sync_and_gather_intermediate_tensors
    if getattr(gather, "makes_room", False):
        return

    @functools.wraps(gather)
    def gather_with_room(runner: Any, *args: Any, **named: Any) -> Any:
        if runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )
        return gather(runner, *args, **named)

    gather_with_room.makes_room = True  # type: ignore[attr-defined]
    GPUModelRunner.sync_and_gather_intermediate_tensors = gather_with_room
