"""What vLLM decided about the KV it stores: number format, scales, heads. Read from its own configuration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pdmesh.core.kv_format import UNSCALED
from pdmesh.engine.vllm.fingerprint import digest

BESIDE = "per-token-head"  # scales lie in the same block as the numbers and travel with them
_DIGEST_CHARS = 8
_ALIASES = {"fp8": "fp8_e4m3"}


@dataclass(frozen=True, slots=True)
class KvFacts:
    dtype: str
    scales: str
    num_heads: int  # kv heads of the whole model


def kv_facts(vllm_config: Any, layer_names: Iterable[str]) -> KvFacts:
    """Once the weights are loaded, which may bring scales. Any: vLLM's configuration is no stable type."""
    model = vllm_config.model_config
    stored = vllm_config.cache_config.cache_dtype
    computed = str(model.dtype).removeprefix("torch.")
    context = vllm_config.compilation_config.static_forward_context
    values = [_tensor_scales(context[name]) for name in layer_names]
    return KvFacts(
        kv_dtype(stored, computed), kv_scales(stored, values), model.get_total_num_kv_heads()
    )


def kv_dtype(stored: str, computed: str) -> str:
    """The number format of `kv_cache_dtype` = `stored`, of a model computed in `computed`."""
    if stored == "auto":
        return computed
    return _ALIASES.get(stored, stored).removesuffix("_per_token_head")


def kv_scales(stored: str, values: Iterable[tuple[float, float]]) -> str:
    """How the stored numbers are scaled. `values` are each layer's of K and of V, where one is for all its numbers:
    they come with the checkpoint, so both sides have them and need to be sure only that they are the same."""
    if stored.endswith("_per_token_head"):
        return BESIDE
    if not stored.startswith(("fp8", "int8")):
        return UNSCALED
    return f"per-tensor-{digest(f'{k!r} {v!r}' for k, v in values)[:_DIGEST_CHARS]}"


def _tensor_scales(layer: Any) -> tuple[float, float]:
    return float(getattr(layer, "_k_scale_float", 1.0)), float(
        getattr(layer, "_v_scale_float", 1.0)
    )
