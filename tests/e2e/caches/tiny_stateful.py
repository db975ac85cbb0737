"""Models with random weights in which some layers keep a state and others have attention: a few MB.

The weights have a large variance, so that an answer depends on all that its layers have seen. vLLM
0.32 has CPU kernels for each of these layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tests.e2e.caches.tiny_windowed import VOCABULARY_SIZE

NUM_LAYERS: Final = 4
NUM_STATES: Final = 2  # layers with a state; the others have attention
WORDS: Final = slice(1000, 1016)  # the only tokens that a model in bfloat16 draws
_SIZES: Final[dict[str, Any]] = {  # Any: numbers and flags of transformers
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
    """Short convolutions beside attention, as LFM2 has them: a state of two tokens' inputs."""
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
    """Mamba-2 beside attention, as Granite 4 has them: a state of all tokens."""
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
    """The gated delta rule beside attention, as Qwen3-Next has them, and experts.

    vLLM's CPU kernel for it takes heads of 128 in bfloat16 only. So it draws from few words, of
    which two are rarely almost equally likely.
    """
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **_SIZES | {"tie_word_embeddings": False},
        head_dim=64,  # so that 128 tokens of attention hold a state
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=4,
        num_experts_per_tok=4,  # all, because rounding may change the choice
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    return _write(Qwen3NextForCausalLM, config, directory, seed, WORDS)


def write_tiny_zamba2(directory: Path, seed: int = 0) -> Path:
    """Mamba-2 beside attention layers that vLLM builds in another order than it computes them."""
    from transformers import Zamba2Config, Zamba2ForCausalLM

    config = Zamba2Config(
        **_SIZES | {"num_hidden_layers": 8},
        layers_block_type=["mamba", "hybrid"] * 4,
        num_mem_blocks=2,  # blocks of attention, which take turns
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


def _write(  # Any: of transformers
    kind: Any, config: Any, directory: Path, seed: int, words: slice | None = None
) -> Path:
    """The same seed gives the same weights on every machine. `words`: the only ones to draw."""
    import torch

    torch.manual_seed(seed)
    model = kind(config)
    if words is not None:
        with torch.no_grad():
            model.lm_head.weight[: words.start] = 0
            model.lm_head.weight[words.stop :] = 0
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory
