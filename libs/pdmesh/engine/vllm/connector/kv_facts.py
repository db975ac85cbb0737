"""Reads from vLLM's configuration how it computes and stores KV: number format, scales, heads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from pdmesh.core.kv.layout.compatibility import UNSCALED
from pdmesh.core.kv.layout.rank_place import RankPlace
from pdmesh.engine.vllm.model.fingerprint import digest
from pdmesh.engine.vllm.model.rotation import rotation_text

BESIDE = "per-token-head"  # scales lie in the same block as the numbers and travel with them
CHECKPOINT = "per-tensor-checkpoint"  # one scale per tensor, from the model's files
_DIGEST_CHARS = 8
_ALIASES = {"fp8": "fp8_e4m3"}
# Kinds of rope whose rotation does not depend on `max_model_len`.
_ANY_LENGTH: Final = frozenset({"default", "linear", "llama3"})
_BY_LENGTH: Final = ("llama4",)  # models whose attention depends on `max_model_len`


@dataclass(frozen=True, slots=True)
class KvFacts:
    dtype: str
    scales: str
    num_heads: int  # KV heads of the model; 1 for latent attention, where each rank has all KV
    computed: str  # digest of the settings that change the KV
    backends: str  # names of the attention kernels, which may decide the layout within a block


def as_stage(facts: KvFacts) -> KvFacts:
    """The facts without the layers' scales, which differ between pipeline stages.

    The scales come from the model's files. Instances compare digests of these files anyway.
    """
    is_tensors = facts.scales not in (UNSCALED, BESIDE)
    return replace(facts, scales=CHECKPOINT if is_tensors else facts.scales)


def layers_by_stage(vllm_config: Any) -> tuple[int, ...]:
    """How many of the model's layers each pipeline stage has. Empty if there is only one stage.

    Raises ValueError if `VLLM_PP_LAYER_PARTITION` does not fit the model.
    """
    num_stages = vllm_config.parallel_config.pipeline_parallel_size
    if num_stages == 1:
        return ()
    from vllm.distributed.utils import get_pp_indices

    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    runs = [get_pp_indices(num_layers, stage, num_stages) for stage in range(num_stages)]
    return tuple(end - start for start, end in runs)


def rank_place(vllm_config: Any) -> RankPlace:
    """The place of this worker's rank in its engine. Raises ValueError like `layers_by_stage`."""
    parallel = vllm_config.parallel_config
    return RankPlace(parallel.rank, parallel.world_size, layers_by_stage(vllm_config))


def kv_facts(vllm_config: Any, layer_names: Iterable[str]) -> KvFacts:
    """Reads the facts of the given layers. The weights must be loaded, because they may set scales.

    `vllm_config` is Any because vLLM does not promise a stable type.
    """
    model = vllm_config.model_config
    stored = vllm_config.cache_config.cache_dtype
    computed = str(model.dtype).removeprefix("torch.")
    context = vllm_config.compilation_config.static_forward_context
    layer_names = list(layer_names)
    values = [_tensor_scales(context[name]) for name in layer_names]
    kernels = {_kernel(context[name]) for name in layer_names}
    return KvFacts(
        kv_dtype(stored, computed),
        kv_scales(stored, values),
        1 if model.use_mla else model.get_total_num_kv_heads(),
        digest(how_computed(vllm_config)),
        " ".join(sorted(kernels)),
    )


def how_computed(vllm_config: Any) -> list[str]:
    """Settings that change the KV, as vLLM derived them from its own configuration and the model's.

    If one of these settings differs, two engines with equal weights compute different KV.
    """
    model = vllm_config.model_config
    text = model.hf_text_config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    model_type = str(getattr(text, "model_type", ""))
    length = model.max_model_len if length_decides(model_type, rope) else "any"
    implementation = str(getattr(model, "model_impl", "auto"))
    return [
        *([f"implementation {implementation}"] if implementation != "auto" else []),
        f"quantization {model.quantization}",
        f"window {_window(model)}",
        f"rope {_plain(rope)}",
        f"length {length}",
        f"overrides {_plain(model.hf_overrides)}",
        f"adapters {vllm_config.lora_config is not None}",
        *rotation_text(vllm_config),
    ]


def _window(model: Any) -> str:
    """The attention window, as text.

    With a window, release 0.1.0 computed wrong KV. The word `whole` prevents an exchange of KV with
    that release.
    """
    window = model.get_sliding_window()
    return f"{window} {model.disable_sliding_window}" + (" whole" if window is not None else "")


def length_decides(model_type: str, rope: object) -> bool:
    """Whether `max_model_len` changes the KV of prompts that are shorter than this limit.

    The answer for unknown kinds of rope is True, to be safe.
    """
    return model_type.startswith(_BY_LENGTH) or not _rope_types(rope) <= _ANY_LENGTH


def _rope_types(rope: object) -> set[str]:
    """The rope types of all layers. Some models have one rope for each type of layer."""
    if not isinstance(rope, Mapping):
        return set()
    kinds = {str(rope[key]) for key in ("rope_type", "type") if rope.get(key) is not None}
    return kinds.union(*map(_rope_types, rope.values()))


def _plain(value: object) -> str:
    """A text of `value` that is the same in every process."""
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    return json.dumps(value, sort_keys=True, default=str)


def kv_dtype(stored: str, computed: str) -> str:
    """The number format of the stored KV.

    `stored` is vLLM's setting `kv_cache_dtype`. The model computes in the format `computed`.
    """
    if stored == "auto":
        return computed
    return _ALIASES.get(stored, stored).removesuffix("_per_token_head")


def kv_scales(stored: str, values: Iterable[tuple[float, float]]) -> str:
    """How the stored numbers are scaled.

    `values` has each layer's scales of K and V, for formats with one scale per tensor. Prefill and
    decode both read these scales from the checkpoint, so it is enough to compare them.
    """
    if stored.endswith("_per_token_head"):
        return BESIDE
    if not stored.startswith(("fp8", "int8")):
        return UNSCALED
    return f"per-tensor-{digest(f'{k!r} {v!r}' for k, v in values)[:_DIGEST_CHARS]}"


def _kernel(layer: Any) -> str:
    backend = getattr(layer, "attn_backend", None)
    return str(backend.get_name()) if backend is not None else ""


def _tensor_scales(layer: Any) -> tuple[float, float]:
    return float(getattr(layer, "_k_scale_float", 1.0)), float(
        getattr(layer, "_v_scale_float", 1.0)
    )
