"""Checks the machine's memory and processor before vLLM starts.

Without these checks, vLLM would fail late, with the cause hidden in its child process's log.
"""

from __future__ import annotations

from pathlib import Path

import structlog

from pdmesh.engine.vllm.child import cpu_features
from pdmesh.engine.vllm.config import Placed
from pdmesh.errors import EngineFailed, EngineMisconfigured

log = structlog.get_logger(__name__)

RUNTIME_BYTES = 900 << 20  # taken by torch, vLLM and activations in each worker
_DTYPE_BYTES = {"float32": 4}  # other formats take the size of the stored weights


def weight_bytes(model_dir: Path) -> int:
    """The size of the weight files, which nearly always hold 2 bytes per parameter."""
    return sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))


def needed_bytes(config: Placed, weights: int) -> int:
    """Roughly how much memory an engine's workers take on a CPU. Each holds a part of the weights.

    Arenas, the memory for transfers, are left out, because they take memory only as they are used.
    """
    loaded = weights * _DTYPE_BYTES.get(config.effective_dtype, 2) // 2
    return loaded + config.num_ranks * (config.kv_cache_bytes + RUNTIME_BYTES)


def available_bytes(meminfo: str) -> int | None:
    """MemAvailable of /proc/meminfo, in bytes. None if the line is missing."""
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def check_memory(config: Placed, draft_dir: Path | None = None) -> None:
    """Raises EngineFailed if an engine on a CPU would not fit into the free memory.

    `draft_dir` has speculation's draft model, if there is one. vLLM itself checks a GPU's memory.
    """
    if config.device != "cpu":
        return
    try:
        available = available_bytes(Path("/proc/meminfo").read_text())
    except OSError:
        return  # not Linux
    weights = sum(weight_bytes(each) for each in (config.model_dir, draft_dir) if each is not None)
    needed = needed_bytes(config, weights)
    if available is not None and available < needed:
        raise EngineFailed(
            f"not enough memory for {config.instance_id}: it needs about {needed >> 20} MiB and "
            f"{available >> 20} MiB are free; lower kv_cache_bytes, use dtype bfloat16, or start "
            "fewer instances",
            reason="OUT_OF_MEMORY",
        )


def check_processor(config: Placed) -> None:
    """Raises EngineMisconfigured for settings that this CPU cannot run. Logs slow settings.

    vLLM itself checks a GPU.
    """
    if config.device != "cpu":
        return
    flags = cpu_features.own_flags()
    if missing := cpu_features.missing_for(config.kv_cache_dtype, flags):
        raise EngineMisconfigured(missing, reason="CPU_FEATURE_MISSING")
    if slow := cpu_features.slow_for(config.effective_dtype, flags):
        log.warning("vllm.slow_dtype", dtype=config.effective_dtype, reason=slow)
