"""Writes a LLaVA with random weights and all of its files.

The model has a CLIP tower, a projector and a Llama. One image takes `NUM_IMAGE_TOKENS` tokens. The
weights have a large variance, so that the answer depends on the whole prompt and its image.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.fakes.tiny_llama import llama_config

IMAGE_SIZE, PATCH_SIZE = 28, 7
NUM_IMAGE_TOKENS: Final = (IMAGE_SIZE // PATCH_SIZE) ** 2
HIDDEN_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS = 256, 4, 2, 64, 3
_BYTES: Final = 256
BOS, EOS, IMAGE, PAD = _BYTES, _BYTES + 1, _BYTES + 2, _BYTES + 3
VOCABULARY_SIZE: Final = 320
CHAT_TEMPLATE: Final = (
    "<s>{% for message in messages %}{{ message.role }}: "
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>\n{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tiny_llava(directory: Path, seed: int = 0) -> Path:
    """Write a model of a few MB. The same seed gives the same weights on every machine."""
    import torch
    from transformers import (
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    torch.manual_seed(seed)
    text = llama_config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=512,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        projection_dim=64,
        initializer_range=0.3,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_seq_length=NUM_IMAGE_TOKENS,
        pad_token_id=PAD,
        initializer_range=0.15,
    )
    model = LlavaForConditionalGeneration(config).to(torch.bfloat16)
    with torch.no_grad():
        for weight in model.model.multi_modal_projector.parameters():
            torch.nn.init.normal_(weight, std=0.3)
        torch.nn.init.normal_(model.model.vision_tower.embeddings.patch_embedding.weight, std=0.3)
    model.save_pretrained(directory)
    CLIPImageProcessorPil(
        size={"shortest_edge": IMAGE_SIZE}, crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    ).save_pretrained(directory)
    write_tokenizer(directory, ("<s>", "</s>", "<image>", "<pad>"), CHAT_TEMPLATE)
    processor = {
        "processor_class": "LlavaProcessor",
        "patch_size": PATCH_SIZE,
        "image_token": "<image>",
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    }
    (directory / "processor_config.json").write_text(json.dumps(processor))
    return directory


def write_tokenizer(directory: Path, special: Sequence[str], chat_template: str) -> None:
    """Write a tokenizer with a token for each byte. The special tokens follow."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": chat_template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
