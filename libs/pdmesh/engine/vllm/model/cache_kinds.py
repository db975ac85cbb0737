"""Which models keep all that a request needs as KV by token; the mesh moves no other state."""

from __future__ import annotations

from typing import Any, Final

from pdmesh.errors import EngineMisconfigured

_LINEAR: Final = "linear_attention"  # a layer's kind in a model's configuration


def check_cache_kinds(model: Any, *, reuses_prefixes: bool) -> None:
    """Raises EngineMisconfigured that names what of the model keeps no KV by token.

    `reuses_prefixes`: whether vLLM, which was asked to cache prefixes, does so for this model. Any:
    vLLM's `ModelConfig`, which is no stable type.
    """
    if not reuses_prefixes:  # pools, files and migrations would reuse what vLLM itself does not
        raise EngineMisconfigured(
            f"{model.served_model_name} has KV that depends on more than the tokens before it: "
            "vLLM caches no prefixes of it, and the mesh moves none (docs/cache-kinds.md)",
            reason="MODEL_UNSUPPORTED",
        )
    if getattr(model.hf_text_config, "num_kv_shared_layers", 0):
        raise EngineMisconfigured(
            f"{model.served_model_name} has layers that use the KV of other layers: the mesh moves "
            "the KV that each layer keeps for itself (docs/cache-kinds.md)",
            reason="MODEL_UNSUPPORTED",
        )
    if (feature := without_kv(model)) is not None:
        raise EngineMisconfigured(
            f"{model.served_model_name} has {feature}: the mesh moves KV by token and no other "
            "state (docs/cache-kinds.md)",
            reason="MODEL_UNSUPPORTED",
        )


def without_kv(model: Any) -> str | None:
    """The model's layers, in words, whose state is no KV by token; None if there are none."""
    if model.is_attention_free:  # transformers calls Mamba's layers linear attention
        return "state-space layers"
    if model.has_inner_state:
        kinds = getattr(model.hf_text_config, "layer_types", None) or ()
        return "linear attention" if _LINEAR in kinds else "state-space layers"
    return "cross attention" if model.is_encoder_decoder else None
