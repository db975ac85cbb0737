"""Images in vLLM: what its processor makes of one, and the inputs of a request that has some.

The image's digest is its name in vLLM, and so part of the names of blocks. A prefill gets the
image; a decode gets only the name, since the KV that it pulls was computed with the image.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import structlog

from pdmesh.core.images.header import NotAnImage, read_header
from pdmesh.core.images.prompt_image import MAX_EXPANSION, ImageFacts, PromptImage, collapsed
from pdmesh.engine.vllm.config import MAX_IMAGES
from pdmesh.errors import EngineFailed, ImageUnusable

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = structlog.get_logger(__name__)

_MAX_PIXELS: Final = 256 << 20  # gateways have a lower bound of their own
_MAX_DECODED: Final = 2  # at once
_IMAGE: Final = "image"
# Images of these sizes must take the same tokens, or the model's images have no fixed length.
_TRIED_SIZES: Final = ((64, 64), (640, 120), (90, 700))
# Where configurations name the token that a template writes for an image.
_PLACEHOLDERS: Final = ("image_token_id", "image_token_index", "boi_token_index")


def find_facts(llm: AsyncLLM) -> ImageFacts | None:
    """How the model takes images; None, with the reason in the log, if the mesh serves none.

    Blocks: it runs the model's processor.
    """
    config = llm.model_config
    reason = ""
    if config.uses_mrope:
        reason = "positions depend on the size of an image"
    elif config.is_mm_prefix_lm:
        reason = "the tokens of an image attend to each other in both directions"
    else:
        for name in _PLACEHOLDERS:
            placeholder = getattr(config.hf_config, name, None)
            if isinstance(placeholder, int) and (expansion := _expansion(llm, placeholder)):
                return ImageFacts(placeholder, expansion, MAX_IMAGES)
        reason = "not every image takes the same tokens in place of one placeholder"
    log.warning("vllm.images.unsupported", model=config.model, reason=reason)
    return None


def _expansion(llm: AsyncLLM, placeholder: int) -> tuple[int, ...]:
    """The tokens of every tried image; empty if they differ."""
    from PIL import Image

    found = set()
    for size in _TRIED_SIZES:
        try:
            made = _processed(llm, [placeholder], [Image.new("RGB", size)])
        except Exception as error:  # noqa: BLE001  a processor of any model may raise anything
            log.debug("vllm.images.not_a_placeholder", error=error.__class__.__name__)
            return ()
        tokens = tuple(made["prompt_token_ids"])
        (place,) = made["mm_placeholders"][_IMAGE]
        if (place.offset, place.length) != (0, len(tokens)):
            return ()
        found.add(tokens)
    tokens = found.pop()
    return tokens if not found and len(tokens) <= MAX_EXPANSION else ()


class VllmImages:
    """Makes the inputs of requests with images. `facts` None: the model takes none."""

    def __init__(self, llm: AsyncLLM, facts: ImageFacts | None) -> None:
        self._llm, self._facts = llm, facts
        self._room = asyncio.Semaphore(_MAX_DECODED)

    async def input_of(
        self, prompt: list[int], images: Sequence[PromptImage], cache_salt: str
    ) -> Any:
        """Any: vLLM's own type.

        Raises ImageUnusable, or EngineFailed if the prompt was made for another instance's model.
        """
        from vllm.inputs import mm_input

        assert self._facts is not None, "admission refuses images of other models"
        items: list[Any] = [None] * len(images)
        places: list[Any] = _places(images)
        if images[0].data:
            made = await self._made(prompt, images, self._facts.placeholder)
            items, places = list(made["mm_kwargs"][_IMAGE]), list(made["mm_placeholders"][_IMAGE])
        return mm_input(
            prompt,
            {_IMAGE: items},
            {_IMAGE: [image.digest.hex() for image in images]},
            {_IMAGE: places},
            cache_salt=cache_salt or None,
        )

    async def _made(
        self, prompt: list[int], images: Sequence[PromptImage], placeholder: int
    ) -> Any:
        """What vLLM's processor makes of the images. Raises ImageUnusable, EngineFailed."""
        async with self._room:
            pictures = await asyncio.to_thread(lambda: [decoded(each.data) for each in images])
            short = collapsed(prompt, images, placeholder)
            made = await asyncio.to_thread(_processed, self._llm, short, pictures)
        is_same = made["prompt_token_ids"] == prompt
        found = [(place.offset, place.length) for place in made["mm_placeholders"][_IMAGE]]
        if not is_same or found != [(i.position, i.num_tokens) for i in images]:
            raise EngineFailed("the prompt has other tokens for its images than the model here")
        return made


def decoded(data: bytes) -> Any:
    """The picture, as plain vLLM reads it. Any: PIL's type. Raises ImageUnusable."""
    from vllm.multimodal.media.image import ImageMediaIO

    try:
        if read_header(data).num_pixels > _MAX_PIXELS:
            raise ImageUnusable("the image has too many pixels")
        media = ImageMediaIO().load_bytes(data)
    except ImageUnusable:
        raise
    except NotAnImage as error:
        raise ImageUnusable(str(error)) from None
    except Exception as error:  # noqa: BLE001  PIL's decoders raise many kinds of errors
        name = error.__class__.__name__
        raise ImageUnusable(f"the image cannot be decoded: {name}") from None
    return getattr(media, "media", media)


def _places(images: Sequence[PromptImage]) -> list[Any]:
    from vllm.multimodal.inputs import PlaceholderRange

    return [PlaceholderRange(offset=i.position, length=i.num_tokens) for i in images]


def _processed(llm: AsyncLLM, prompt: list[int], pictures: Sequence[Any]) -> Any:
    """vLLM's processor, which may block for tens of milliseconds."""
    return llm.renderer._process_multimodal(prompt, {_IMAGE: list(pictures)}, None, None)
