"""Writes models of a few MB with random weights, in which some layers keep a state.

The other layers have attention. The weights have a large variance, so that an answer depends on all
tokens that its layers have seen. vLLM 0.32 has CPU kernels for each of these layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tests.e2e.caches.tiny_windowed import VOCABULARY_SIZE

NUM_LAYERS: Final = 4
NUM_STATES: Final = 2  # layers with a state
WORDS: Final = slice(1000, 1016)  # the only tokens that the model in bfloat16 draws
# the type is Any because transformers takes numbers and flags here
_SIZES: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def write_tiny_lfm2(directory: Path, seed: int = 0) -> Path:
    """Short convolutions beside attention, as in LFM2. A state has the inputs of two tokens."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        **_SIZES,
        conv_L_cache=3,
        conv_dim=128,
        block_dim=128,
        block_ff_dim=256,
        block_auto_adjust_ff_dim=False,
        layer_types=["conv", "full_attention"] * 2,
    )
    return _write(Lfm2ForCausalLM, config, directory, seed)


def write_tiny_granite(directory: Path, seed: int = 0) -> Path:
    """Mamba-2 beside attention, as in Granite 4. A state depends on all tokens."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        **_SIZES,
        layer_types=["mamba", "attention"] * 2,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_expand=2,
        mamba_chunk_size=32,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=256,
        attention_multiplier=0.18,
        position_embedding_type="nope",
    )
    return _write(GraniteMoeHybridForCausalLM, config, directory, seed)


def write_tiny_qwen3_next(directory: Path, seed: int = 0) -> Path:
    """The gated delta rule beside attention and experts, as in Qwen3-Next.

    vLLM's CPU kernel for the rule takes only heads of 128 in bfloat16. In bfloat16, near-ties are
    frequent, so the model draws from few words, of which two are rarely almost equally likely.
    """
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **_SIZES | {"tie_word_embeddings": False},
        head_dim=64,  # so that a block of 128 tokens of attention has room for a state
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=4,
        num_experts_per_tok=4,  # all experts, because rounding could change a choice among them
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    return _write(Qwen3NextForCausalLM, config, directory, seed, WORDS)


def write_tiny_zamba2(directory: Path, seed: int = 0) -> Path:
    """Mamba-2 beside attention layers, which vLLM computes in another order than it builds them."""
    from transformers import Zamba2Config, Zamba2ForCausalLM

    config = Zamba2Config(
        **_SIZES | {"num_hidden_layers": 8},
        layers_block_type=["mamba", "hybrid"] * 4,
        num_mem_blocks=2,  # blocks of attention, which the layers use in turn
        use_shared_attention_adapter=False,
        adapter_rank=8,
        use_mem_rope=True,
        n_mamba_heads=8,
        mamba_headdim=32,
        mamba_d_state=16,
        mamba_ngroups=1,
        mamba_expand=2,
        chunk_size=32,
    )
    return _write(Zamba2ForCausalLM, config, directory, seed)


def _write(kind: Any, config: Any, directory: Path, seed: int, words: slice | None = None) -> Path:
    """Write a model. The same seed gives the same weights on every machine.

    If `words` is given, the model draws no other tokens.
    """
    import torch

    torch.manual_seed(seed)
    model = kind(config)
    if words is not None:
        with torch.no_grad():
            model.lm_head.weight[: words.start] = 0
            model.lm_head.weight[words.stop :] = 0
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory
