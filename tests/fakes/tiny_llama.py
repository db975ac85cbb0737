"""A Llama of random weights whose heads divide over ranks: SmolLM2's nine query and three KV heads
do not.

Weights are drawn wide, so that what it draws depends on the whole prompt and zeroed KV shows.
"""

from __future__ import annotations

from pathlib import Path

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS = 8, 4, 64, 4
VOCABULARY_SIZE = 40_960  # the prompts of tests/e2e/cases.py are within it


def write_tiny_llama(directory: Path, seed: int = 0, kv_seed: int | None = None) -> Path:
    """About 50 MB. The same weights for the same seed, whatever the machine.

    `kv_seed`: with other projections of K and V, all else equal, as a fine-tune or a merged adapter
    has them.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=NUM_HEADS * HEAD_DIM,
        intermediate_size=1024,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        initializer_range=0.15,
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
    model.save_pretrained(directory)
    return directory
