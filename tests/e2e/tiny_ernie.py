"""Writes an Ernie 4.5 with one random layer, and one layer for multi-token prediction.

The layer for prediction is a copy of the model's layer, and sees each token except the first. So
its proposals are nearly always right, if the layer reads its own KV of the whole text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tests.e2e.tiny_llama import VOCABULARY_SIZE

if TYPE_CHECKING:
    from torch import Tensor

_HIDDEN, _HEAD = 256, 64


def write_tiny_ernie(directory: Path, seed: int = 0) -> Path:
    """Write the model. The same seed gives the same weights on every machine."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

    torch.manual_seed(seed)
    config = Ernie4_5_MoeConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=_HIDDEN,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=_HIDDEN // _HEAD,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.15,
        tie_word_embeddings=False,
        pad_token_id=None,  # the embedding of a padding token would be all zeros
        moe_layer_start_index=1,  # no layer has experts
    )
    Ernie4_5_MoeForCausalLM(config).save_pretrained(directory)
    file = directory / "model.safetensors"
    weights = load_file(file)
    embedding = weights["model.embed_tokens.weight"]
    # vLLM's `mtp_emb_norm` does the same
    embedding /= embedding.square().mean(dim=1, keepdim=True).sqrt()
    for name in [name for name in weights if name.startswith("model.layers.0.")]:
        copied = name.replace("model.layers.0.", "model.mtp_block.0.")
        rotates = name.endswith(("q_proj.weight", "k_proj.weight"))
        weights[copied] = _in_halves(weights[name]) if rotates else weights[name].clone()
    for name in ("mtp_emb_norm", "mtp_hidden_norm"):
        weights[f"model.{name}.0.weight"] = torch.ones(_HIDDEN)
    # The layer's inputs are the token and the hidden state before it. Only the token has an effect.
    taken = torch.eye(_HIDDEN), torch.zeros(_HIDDEN, _HIDDEN)
    weights["model.mtp_linear_proj.0.weight"] = torch.cat(taken, dim=1)
    save_file(weights, file, metadata={"format": "pt"})
    made = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(made | {"num_nextn_predict_layers": 1}))
    return directory


def _in_halves(weight: Tensor) -> Tensor:
    """The rows of each head in the order of a Llama, in which vLLM computes the copied layer.

    A token's position rotates rows 0 and 1 of an Ernie's head together, and rows 0 and 32 of a
    Llama's.
    """
    heads = weight.unflatten(0, (-1, _HEAD // 2, 2))
    return heads.transpose(1, 2).flatten(0, 2).contiguous()
