"""Images in vLLM: what its processor makes of one, and the inputs of a request that has some.

The image's digest is its name in vLLM, and so part of the names of blocks. The owner of the KV
stands before it: vLLM keeps what its encoder made by that name, and a tenant must not learn from
the time of an answer which images another one sends.

A prefill gets the image; a decode gets only the name, since the KV that it pulls was computed with
the image.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

import structlog

from pdmesh.core.images.header import NotAnImage, read_header
from pdmesh.core.images.prompt_image import MAX_EXPANSION, ImageFacts, PromptImage
from pdmesh.core.images.source import MAX_PIXELS, misfit_of
from pdmesh.engine.vllm.config import MAX_IMAGES
from pdmesh.errors import EngineFailed, ImageMisfit, ImageUnusable
from pdmesh.kv.embeddings.names import identifier_of

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = structlog.get_logger(__name__)

_MAX_DECODED: Final = 2  # at once
_IMAGE: Final = "image"
# Images of these sizes must take the same tokens, or the model's images have no fixed length.
_TRIED_SIZES: Final = ((64, 64), (640, 120), (90, 700))
# So must images of these sizes, if the processor takes them; many refuse a single pixel.
_EXTREME_SIZES: Final = ((1, 1), (4096, 21))
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

    found: set[tuple[int, ...]] = set()
    for size in (*_TRIED_SIZES, *_EXTREME_SIZES):
        try:
            made = _processing(llm, placeholder, Image.new("RGB", size)).result()
        except Exception as error:  # noqa: BLE001  a processor of any model may raise anything
            if size in _EXTREME_SIZES:
                continue
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
        self,
        prompt: list[int],
        images: Sequence[PromptImage],
        cache_salt: str,
        is_cancelled: Callable[[], bool],
    ) -> Any:
        """Any: vLLM's own type.

        Raises ImageUnusable; ImageMisfit if the prompt was made for another instance's model; and
        EngineFailed if the request was cancelled meanwhile.
        """
        from vllm.inputs import mm_input

        assert self._facts is not None, "admission refuses images of other models"
        items: list[Any] = [None] * len(images)
        places: list[Any] = _places(images)
        if images[0].data:
            _check_places(prompt, images, self._facts.expansion)
            async with self._room:
                for at, image in enumerate(images):
                    items[at], place = await self._made(image, is_cancelled)
                    places[at] = replace(place, offset=image.position)
        return mm_input(
            prompt,
            {_IMAGE: items},
            {_IMAGE: [identifier_of(cache_salt, image.digest) for image in images]},
            {_IMAGE: places},
            cache_salt=cache_salt or None,
        )

    async def _made(self, image: PromptImage, is_cancelled: Callable[[], bool]) -> tuple[Any, Any]:
        """What vLLM's processor makes of an image, and its place in a prompt of its own.

        Each image is decoded, processed and dropped before the next one. What the processor makes
        of an image never depends on the others; vLLM's cache of it relies on that.
        """
        assert self._facts is not None
        _check_wanted(is_cancelled)
        picture = await asyncio.to_thread(decoded, image.data)
        _check_wanted(is_cancelled)
        processing = _processing(self._llm, self._facts.placeholder, picture)
        try:
            made = await asyncio.wrap_future(processing)
        except Exception as error:  # noqa: BLE001  any instance would fail with these pixels
            name = error.__class__.__name__
            log.warning("vllm.images.not_processed", size=picture.size, error=name)
            raise ImageUnusable(f"the image cannot be processed: {name}") from None
        (item,), (place,) = made["mm_kwargs"][_IMAGE], made["mm_placeholders"][_IMAGE]
        found = (tuple(made["prompt_token_ids"]), place.offset, place.length)
        if found != (self._facts.expansion, 0, image.num_tokens):
            raise ImageMisfit("an image of this size takes other tokens here")
        return item, place


def decoded(data: bytes) -> Any:
    """The picture, as plain vLLM reads it. Any: PIL's type. Raises ImageUnusable."""
    from vllm.multimodal.image import convert_image_mode, normalize_image

    image = opened(data)
    try:
        image = normalize_image(image)
        image.load()
        return convert_image_mode(image, "RGB")
    except Exception as error:  # noqa: BLE001  PIL's decoders raise many kinds of errors
        raise _not_decoded(error) from None


def opened(data: bytes) -> Any:
    """The picture before its pixels are decoded. Any: PIL's type. Raises ImageUnusable.

    Only the decoder of the header's format is tried. Its size must be the header's, because that
    was checked.
    """
    from PIL import Image

    try:
        header = read_header(data)
    except NotAnImage as error:
        raise ImageUnusable(str(error)) from None
    if why := misfit_of(header, MAX_PIXELS):
        raise ImageUnusable(why)
    try:
        image = Image.open(BytesIO(data), formats=(header.format.upper(),))
    except Exception as error:  # noqa: BLE001  as above
        raise _not_decoded(error) from None
    if image.size != (header.width, header.height):
        raise ImageUnusable("the image has another size than its header says")
    return image


def _not_decoded(error: Exception) -> ImageUnusable:
    return ImageUnusable(f"the image cannot be decoded: {error.__class__.__name__}")


def _check_places(
    prompt: Sequence[int], images: Sequence[PromptImage], expansion: tuple[int, ...]
) -> None:
    """Raises ImageMisfit."""
    for image in images:
        if tuple(prompt[image.position : image.position + image.num_tokens]) != expansion:
            raise ImageMisfit("the prompt has other tokens for its images than the model here")


def _check_wanted(is_cancelled: Callable[[], bool]) -> None:
    """Raises EngineFailed."""
    if is_cancelled():
        raise EngineFailed("it was given up")


def _places(images: Sequence[PromptImage]) -> list[Any]:
    from vllm.multimodal.inputs import PlaceholderRange

    return [PlaceholderRange(offset=i.position, length=i.num_tokens) for i in images]


def _processing(llm: AsyncLLM, placeholder: int, picture: Any) -> Future[Any]:
    """vLLM's processor at work on one image, in the only thread in which vLLM runs it.

    Some processors end the process if two threads run them at once.
    """
    renderer, images = llm.renderer, {_IMAGE: [picture]}
    submit = renderer._mm_executor.submit
    processing: Future[Any] = submit(
        renderer._process_multimodal, [placeholder], images, None, None
    )
    return processing
