"""Decides whether the mesh can move a model's caches.

The mesh moves the caches of models that keep KV for each token. Some layers of such a model may
keep one state for all tokens instead.
"""

from __future__ import annotations

from typing import Any, Final

from pdmesh.errors import EngineMisconfigured

_LINEAR: Final = "linear_attention"  # a layer's kind in a model's configuration
_CONVOLUTION: Final = "conv"


def check_cache_kinds(model: Any, *, reuses_prefixes: bool, has_tiers: bool = False) -> None:
    """Raises EngineMisconfigured, which names the part of the model that cannot be moved or kept.

    `reuses_prefixes` is the result of `may_reuse_prefixes`. `has_tiers` means that KV is also kept
    outside vLLM. `model` is vLLM's `ModelConfig`, which is no stable type.
    """
    name = model.served_model_name
    if not reuses_prefixes:  # tiers and other instances would reuse KV that vLLM does not
        raise _unsupported(
            f"{name} has KV that depends on more than the tokens before it: vLLM caches no "
            "prefixes of it, and the mesh moves none"
        )
    if getattr(model.hf_text_config, "num_kv_shared_layers", 0):
        raise _unsupported(
            f"{name} has layers that use the KV of other layers: the mesh moves the KV that each "
            "layer keeps for itself"
        )
    if (feature := without_kv(model)) is not None:
        raise _unsupported(f"{name} has {feature}: the mesh moves KV by token, or states beside it")
    if has_tiers and (feature := states_of(model)) is not None:
        raise _unsupported(
            f"{name} has {feature}, and tiers keep no states: set kv_host_pool_bytes to 0 and no "
            "kv_file_store_dir"
        )


def may_reuse_prefixes(config: Any) -> bool:
    """Whether a prefix's KV may be reused: vLLM caches prefixes, or only its kernel prevents that.

    With its reference kernel of latent attention for CPUs, vLLM caches no prefixes. But the KV
    still depends only on the tokens before it, and the kernel can compute the tokens after a
    prefix. `config` is vLLM's `VllmConfig`, which is no stable type.
    """
    has_reference_kernel = config.model_config.use_mla and config.device_config.device_type == "cpu"
    return bool(config.cache_config.enable_prefix_caching or has_reference_kernel)


def without_kv(model: Any) -> str | None:
    """The kind of the model's layers if they have no KV that the mesh can move, else None."""
    if model.is_attention_free:
        return "state-space layers alone"
    return "cross attention" if model.is_encoder_decoder else None


def states_of(model: Any) -> str | None:
    """The kind of layers that keep one state for all tokens, or None."""
    if not model.has_inner_state:
        return None
    kinds = getattr(model.hf_text_config, "layer_types", None) or ()
    if _LINEAR in kinds:
        return "linear attention"
    return "short convolutions" if _CONVOLUTION in kinds else "state-space layers"


def _unsupported(why: str) -> EngineMisconfigured:
    return EngineMisconfigured(f"{why} (docs/cache-kinds.md)", reason="MODEL_UNSUPPORTED")
