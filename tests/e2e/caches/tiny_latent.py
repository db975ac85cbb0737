"""Writes a model of a few MB with random weights and latent attention (MLA), as in DeepSeek V3.

Latents and heads have the sizes of DeepSeek, because some of vLLM's kernels support no others. The
model has a separate output layer, because vLLM's DeepSeek ignores `tie_word_embeddings`. With tied
embeddings, vLLM would draw with an uninitialised output layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tests.e2e.caches.tiny_windowed import VOCABULARY_SIZE

LATENT: Final = 512  # numbers per token and layer
ROTATED: Final = 64  # further numbers, rotated by the token's position
NUM_LAYERS: Final = 3
# weight of the last norm, with which few tokens are nearly as likely as the likeliest
_SHARPNESS: Final = 16.0
_LONGEST: Final = 4096
# the type is Any because transformers takes numbers and a name here
_YARN: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": _LONGEST // 4,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "beta_fast": 32,
    "beta_slow": 1,
}


def write_tiny_deepseek(directory: Path, seed: int = 0) -> Path:
    """Write a DeepSeek V3 without experts, which keep no KV. The same seed gives the same model."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=LATENT,
        q_lora_rank=64,
        qk_rope_head_dim=ROTATED,
        qk_nope_head_dim=128,
        v_head_dim=128,
        first_k_dense_replace=NUM_LAYERS,
        max_position_embeddings=_LONGEST,
        rope_parameters=_YARN,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM(config)
    with torch.no_grad():
        model.model.norm.weight.fill_(_SHARPNESS)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory
