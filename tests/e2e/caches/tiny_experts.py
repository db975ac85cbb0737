"""Writes a model of a few MB with random weights, whose layers have experts as in Qwen3-MoE."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.e2e.caches.tiny_windowed import VOCABULARY_SIZE

NUM_EXPERTS: Final = 8
NUM_CHOSEN: Final = 2  # experts that compute a token
# weight of the last norm, with which few tokens are nearly as likely as the likeliest
_SHARPNESS: Final = 16.0


def write_tiny_qwen3_moe(directory: Path, seed: int = 0) -> Path:
    """Write the model. The same seed gives the same weights."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=NUM_CHOSEN,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        model.model.norm.weight.fill_(_SHARPNESS)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory
