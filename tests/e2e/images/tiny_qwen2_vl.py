"""Writes a Qwen2-VL with random weights and all of its files.

The model has a vision tower, and a Qwen2 with M-RoPE, in which tokens have a position for each
axis. An image takes one token for each square of `FACTOR` by `FACTOR` pixels, row by row. The
weights have a large variance, so that the answer depends on the whole prompt.

Qwen2-VL's processor needs torchvision for videos. The builds of torchvision on PyPI do not run with
the CPU build of torch. So the folder has a processor for images only, as users may write it. This
processor requires `trust_remote_code`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from pdmesh.core.images.token_grid import GridRule
from tests.e2e.images.tiny_llava import write_tokenizer

PATCH_SIZE, MERGE_SIZE = 7, 2
FACTOR: Final = PATCH_SIZE * MERGE_SIZE
MIN_PIXELS, MAX_PIXELS = 4 * FACTOR**2, 40 * FACTOR**2
RULE: Final = GridRule(FACTOR, MIN_PIXELS, MAX_PIXELS)
HIDDEN_SIZE, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS = 256, 4, 2, 3
_BYTES: Final = 256
BOS, EOS, IMAGE, PAD, VIDEO, VISION_START, VISION_END = range(_BYTES, _BYTES + 7)
VOCABULARY_SIZE: Final = 320
CHAT_TEMPLATE: Final = (
    "<s>{% for message in messages %}{{ message.role }}: "
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_PROCESSOR: Final = '''"""The processor of Qwen2-VL without its part for videos."""

from transformers import Qwen2VLProcessor
from transformers.processing_utils import ProcessorMixin


class ImagesOnlyProcessor(Qwen2VLProcessor):
    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)
'''


def write_tiny_qwen2_vl(directory: Path, seed: int = 0) -> Path:
    """Write a model of a few MB. The same seed gives the same weights on every machine."""
    import torch
    from transformers import (
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        Qwen2VLImageProcessorPil,
    )

    torch.manual_seed(seed)
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": VOCABULARY_SIZE,
            "hidden_size": HIDDEN_SIZE,
            "intermediate_size": 512,
            "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": NUM_HEADS,
            "num_key_value_heads": NUM_KV_HEADS,
            "max_position_embeddings": 4096,
            "initializer_range": 0.15,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [8, 12, 12],
            },
        },
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": HIDDEN_SIZE,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": PATCH_SIZE,
            "spatial_merge_size": MERGE_SIZE,
            "temporal_patch_size": 2,
            "initializer_range": 0.3,
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        initializer_range=0.15,
    )
    model = Qwen2VLForConditionalGeneration(config).to(torch.bfloat16)
    with torch.no_grad():
        for weight in model.model.visual.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(directory)
    Qwen2VLImageProcessorPil(
        patch_size=PATCH_SIZE,
        merge_size=MERGE_SIZE,
        temporal_patch_size=2,
        size={"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
    ).save_pretrained(directory)
    texts = ["<s>", "</s>", "<|image_pad|>", "<pad>", "<|video_pad|>"]
    write_tokenizer(directory, [*texts, "<|vision_start|>", "<|vision_end|>"], CHAT_TEMPLATE)
    (directory / "images_only.py").write_text(_PROCESSOR)
    processor = {
        "processor_class": "ImagesOnlyProcessor",
        "auto_map": {"AutoProcessor": "images_only.ImagesOnlyProcessor"},
    }
    (directory / "processor_config.json").write_text(json.dumps(processor))
    return directory
