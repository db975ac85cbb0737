"""Finds out which tokens stand for an image in a model's prompts.

The mesh has to count the tokens of an image before anything reads its pixels. So it serves only
models in which every image has the same tokens, and models with M-RoPE that resize images as
Qwen2-VL does. To find out which tokens these are, this module runs the model's image processor on
images of several sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import structlog

from pdmesh.core.images.prompt_image import MAX_EXPANSION, ImageFacts
from pdmesh.core.images.token_grid import GridRule
from pdmesh.engine.vllm.config import MAX_IMAGES
from pdmesh.engine.vllm.images.processing import (
    ProcessedImage,
    merge_size_of,
    processed,
    processing,
)

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = structlog.get_logger(__name__)

Size = tuple[int, int]  # width and height, in pixels
_TRIED_SIZES: Final = ((64, 64), (640, 120), (90, 700))
# Processors may refuse these sizes. Many refuse a single pixel.
_EXTREME_SIZES: Final = ((1, 1), (4096, 21))
# Keys in models' configurations for the token that a chat template writes for an image.
_PLACEHOLDERS: Final = ("image_token_id", "image_token_index", "boi_token_index")


def find_facts(llm: AsyncLLM) -> ImageFacts | None:
    """Which tokens stand for an image. None if the mesh serves no images with this model.

    If None, the log has the reason. Blocks while the model's processor runs.
    """
    config = llm.model_config
    if config.is_mm_prefix_lm:
        reason = "the tokens of an image attend to each other in both directions"
    elif config.uses_mrope:
        if (facts := _gridded(llm)) is not None:
            return facts
        reason = "it has M-RoPE, and its images are not resized as those of Qwen2-VL"
    else:
        if (facts := _fixed(llm)) is not None:
            return facts
        reason = "not every image takes the same tokens in place of one placeholder"
    log.warning("vllm.images.unsupported", model=config.model, reason=reason)
    return None


def _fixed(llm: AsyncLLM) -> ImageFacts | None:
    """The facts of a model in which every image has the same tokens. None for other models."""
    for name in _PLACEHOLDERS:
        placeholder = getattr(llm.model_config.hf_config, name, None)
        if isinstance(placeholder, int) and (tried := _tried(llm, placeholder)) is not None:
            tokens = {made.tokens for _, made in tried if made.is_whole}
            is_fixed = len(tokens) == 1 and all(made.is_whole for _, made in tried)
            if is_fixed and len(expansion := tokens.pop()) <= MAX_EXPANSION:
                return ImageFacts(placeholder, expansion, MAX_IMAGES)
    return None


def _gridded(llm: AsyncLLM) -> ImageFacts | None:
    """The facts of a model in which an image's size decides its tokens. None for other models."""
    config = llm.model_config.hf_config
    placeholder, merge_size = getattr(config, "image_token_id", None), merge_size_of(config)
    rule = _rule_of(llm)
    if rule is None or not isinstance(placeholder, int) or not merge_size:
        return None
    facts = ImageFacts(placeholder, (), MAX_IMAGES, rule)
    side = math.isqrt(rule.max_pixels) + rule.factor
    tried = _tried(llm, placeholder, (side, side))
    if tried is None or rule.most_tokens > MAX_EXPANSION:
        return None
    for size, made in tried:
        place = facts.place_of(*size)
        is_so = made.is_whole and made.tokens == facts.tokens_of(place.num_tokens)
        if not is_so or made.num_rows(merge_size) != place.num_rows:
            return None
    return facts


def _rule_of(llm: AsyncLLM) -> GridRule | None:
    """The rule for resizing images, from the settings of the model's processor.

    The caller checks the rule with trial images.
    """
    try:
        processor = llm.renderer.get_mm_processor().info.get_hf_processor().image_processor
        least, most = (int(processor.size[name]) for name in ("shortest_edge", "longest_edge"))
        rule = GridRule(processor.patch_size * processor.merge_size, max(1, least), most)
    except (AttributeError, KeyError, TypeError):
        return None
    return rule if rule.factor > 0 and rule.max_pixels >= rule.factor**2 else None


def _tried(
    llm: AsyncLLM, placeholder: int, *further: Size
) -> Sequence[tuple[Size, ProcessedImage]] | None:
    """The processor's results for images of several sizes. None if it refuses an ordinary size."""
    from PIL import Image

    found = []
    for size in (*_TRIED_SIZES, *_EXTREME_SIZES, *further):
        try:
            made = processing(llm, placeholder, Image.new("RGB", size)).result()
        except Exception as error:  # noqa: BLE001  a processor of any model may raise anything
            if size in _EXTREME_SIZES:
                continue
            log.debug("vllm.images.not_a_placeholder", error=error.__class__.__name__)
            return None
        found.append((size, processed(made)))
    return found
