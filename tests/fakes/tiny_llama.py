"""A Llama with random weights whose heads can be divided among ranks.

The nine query heads and three KV heads of SmolLM2 cannot be divided. The weights have a large
variance, so that the answer depends on the whole prompt, and zeroed KV changes the answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS = 8, 4, 64, 4
VOCABULARY_SIZE = 40_960  # larger than all token ids in the prompts of tests/e2e/cases.py


def llama_config(**sizes: int) -> Any:
    """The settings of a Llama whose weights have a large variance.

    The type is Any because it is a class of transformers, which is imported late.
    """
    from transformers import LlamaConfig

    return LlamaConfig(max_position_embeddings=4096, initializer_range=0.15, **sizes)


def write_tiny_llama(
    directory: Path, seed: int = 0, kv_seed: int | None = None, max_shard_size: str = "5GB"
) -> Path:
    """Write a model of about 50 MB. The same seed gives the same weights on every machine.

    `kv_seed` changes only the projections of K and V, as a fine-tune or a merged adapter does.
    """
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    config = llama_config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=NUM_HEADS * HEAD_DIM,
        intermediate_size=1024,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    if kv_seed is not None:
        torch.manual_seed(kv_seed)
        for layer in model.model.layers:
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                torch.nn.init.normal_(projection.weight, std=config.initializer_range)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory
