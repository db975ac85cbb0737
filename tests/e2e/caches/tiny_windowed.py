"""Writes models of a few MB with random weights and sliding-window layers.

The weights have a large variance, so that an answer depends on all tokens that its layers see. The
window is shorter than most prompts of the tests, and is no multiple of a block.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

WINDOW: Final = 100  # tokens that a sliding layer sees, including the current one
NUM_LAYERS: Final = 6
NUM_SLIDING: Final = 4  # sliding layers of the model that has both kinds
LAYER_BYTES: Final = 2 * 2 * 64 * 4  # bytes per token in fp32: K and V of two heads
VOCABULARY_SIZE: Final = 40_960  # larger than all token ids in the prompts of tests/e2e/cases.py
# the type is Any because transformers takes numbers and flags here
_SIZES: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": WINDOW,
}


def write_tiny_gemma(directory: Path, seed: int = 0) -> Path:
    """Sliding-window layers beside layers of full attention, as in Gemma 3."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention"] * 2 + ["full_attention"]
    config = Gemma3TextConfig(**_SIZES, layer_types=kinds * 2, query_pre_attn_scalar=64)
    return _write(Gemma3ForCausalLM, config, directory, seed, embedding_scale=0.1)


def write_tiny_mistral(directory: Path, seed: int = 0) -> Path:
    """Every layer has the same sliding window, as in the first Mistral."""
    from transformers import MistralConfig, MistralForCausalLM

    return _write(MistralForCausalLM, MistralConfig(**_SIZES), directory, seed)


def _write(
    kind: Any, config: Any, directory: Path, seed: int, embedding_scale: float = 1.0
) -> Path:
    """Write a model. The same seed gives the same weights on every machine.

    Gemma multiplies its embeddings, which are also its output layer. Without `embedding_scale`, the
    likeliest next token would always be the token just read.
    """
    import torch

    torch.manual_seed(seed)
    model = kind(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(embedding_scale)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory
