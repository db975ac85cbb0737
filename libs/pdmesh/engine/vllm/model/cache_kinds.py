"""Which models keep what the mesh can move: KV by token, or a state beside KV by token."""

from __future__ import annotations

from typing import Any, Final

from pdmesh.errors import EngineMisconfigured

_LINEAR: Final = "linear_attention"  # a layer's kind in a model's configuration
_CONVOLUTION: Final = "conv"


def check_cache_kinds(model: Any, *, reuses_prefixes: bool, has_tiers: bool = False) -> None:
    """Raises EngineMisconfigured that names what of the model cannot be moved or kept.

    `reuses_prefixes`: whether the KV of a prefix may be used again (`may_reuse_prefixes`).
    `has_tiers`: blocks are to be kept outside vLLM. Any: vLLM's `ModelConfig`, which is no stable
    type.
    """
    name = model.served_model_name
    if not reuses_prefixes:  # pools, files and migrations would reuse what vLLM itself does not
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
    """Whether prefixes may be reused: vLLM caches them, or only its kernel prevents that.

    With its reference kernel of latent attention for CPUs, vLLM caches none. But that KV depends
    only on the tokens before it, and the kernel can compute tokens after a prefix. Any: vLLM's
    `VllmConfig`, which is no stable type.
    """
    has_reference_kernel = config.model_config.use_mla and config.device_config.device_type == "cpu"
    return bool(config.cache_config.enable_prefix_caching or has_reference_kernel)


def without_kv(model: Any) -> str | None:
    """The kind of the model's layers, in words, if it has no KV that the mesh can name; or None."""
    if model.is_attention_free:
        return "state-space layers alone"
    return "cross attention" if model.is_encoder_decoder else None


def states_of(model: Any) -> str | None:
    """The kind of layers, in words, that keep a state for all tokens; None if there are none."""
    if not model.has_inner_state:
        return None
    kinds = getattr(model.hf_text_config, "layer_types", None) or ()
    if _LINEAR in kinds:
        return "linear attention"
    return "short convolutions" if _CONVOLUTION in kinds else "state-space layers"


def _unsupported(why: str) -> EngineMisconfigured:
    return EngineMisconfigured(f"{why} (docs/cache-kinds.md)", reason="MODEL_UNSUPPORTED")
