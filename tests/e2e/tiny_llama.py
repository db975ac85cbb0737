"""Writes a Llama with random weights and one token for each byte. It has a few MB.

The weights have a large variance, so that an answer depends on its whole prompt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

_BYTES: Final = 256
EOS: Final = _BYTES + 1
VOCABULARY_SIZE: Final = 320


def write_tiny_llama(directory: Path, seed: int = 0) -> Path:
    """Write the model. The same seed gives the same weights on every machine."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        initializer_range=0.15,
        bos_token_id=_BYTES,
        eos_token_id=EOS,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    write_byte_tokenizer(directory)
    return directory


def write_byte_tokenizer(directory: Path) -> None:
    """Write a tokenizer whose token n is the n-th of the letters that stand for bytes.

    `<s>` and `</s>` follow.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(directory / "tokenizer.json"))
    texts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(texts))
