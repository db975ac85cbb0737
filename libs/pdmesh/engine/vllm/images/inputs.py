"""Makes the inputs of a vLLM request that has images.

In vLLM, an image's name is the owner of its KV, followed by the image's digest. The name is part of
the names of KV blocks, and vLLM keeps its encoder's output under the name. The owner is included
because a tenant must not learn, from the time that an answer takes, which images another tenant
sends.

A prefill receives the image. A decode receives no pixels, because the KV that it pulls was computed
with them. With M-RoPE, it does receive the number of rows and columns of patches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import structlog

from pdmesh.core.images.prompt_image import ImageFacts, PromptImage
from pdmesh.engine.vllm.images.processing import (
    GRID,
    IMAGE,
    ProcessedImage,
    decoded,
    merge_size_of,
    processed,
    processing,
)
from pdmesh.errors import EngineFailed, ImageMisfit, ImageUnusable
from pdmesh.kv.embeddings.names import identifier_of

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = structlog.get_logger(__name__)

_MAX_DECODED: Final = 2  # images that are decoded and processed at once


class VllmImages:
    """Makes the inputs of requests with images. `facts` is None if the model takes no images."""

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
        """The request's input, of vLLM's own type.

        Raises ImageUnusable, ImageMisfit if the prompt was made for another instance's model, and
        EngineFailed if the request was cancelled during the call.
        """
        from vllm.inputs import mm_input

        assert self._facts is not None, "admission refuses images of other models"
        items: list[Any] = [None] * len(images)
        places: list[Any] = _places(images)
        _check_places(prompt, images, self._facts)
        if images[0].data:
            async with self._room:
                for at, image in enumerate(images):
                    items[at], place = await self._made(image, is_cancelled)
                    places[at] = replace(place, offset=image.position)
        elif self._facts.grid is not None:
            items = [_rows_of(image, self._merge_size()) for image in images]
        return mm_input(
            prompt,
            {IMAGE: items},
            {IMAGE: [identifier_of(cache_salt, image.digest) for image in images]},
            {IMAGE: places},
            cache_salt=cache_salt or None,
        )

    async def _made(self, image: PromptImage, is_cancelled: Callable[[], bool]) -> tuple[Any, Any]:
        """Process one image, as a prompt of its own. Returns vLLM's item, and the image's place.

        Each image is decoded, processed and dropped before the next one. The item never depends on
        other images: vLLM keeps its encoder's output by the image's name.
        """
        assert self._facts is not None
        _check_wanted(is_cancelled)
        picture = await asyncio.to_thread(decoded, image.data)
        _check_wanted(is_cancelled)
        try:
            made = await asyncio.wrap_future(
                processing(self._llm, self._facts.placeholder, picture)
            )
        except Exception as error:  # noqa: BLE001  any instance would fail with these pixels
            name = error.__class__.__name__
            log.warning("vllm.images.not_processed", size=picture.size, error=name)
            raise ImageUnusable(f"the image cannot be processed: {name}") from None
        found = processed(made)
        self._check_made(image, found)
        return found.item, found.place

    def _merge_size(self) -> int:
        return merge_size_of(self._llm.model_config.hf_config)

    def _check_made(self, image: PromptImage, found: ProcessedImage) -> None:
        """Raises ImageMisfit, or ImageUnusable if metadata turn the image by 90 degrees.

        Gateways read metadata of this kind only from the Exif data of a JPEG image.
        """
        assert self._facts is not None
        expected = self._facts.tokens_of(image.num_tokens)
        num_rows = found.num_rows(self._merge_size()) if self._facts.grid is not None else 0
        if found.tokens == expected and found.is_whole and num_rows == image.num_rows:
            return
        if num_rows and num_rows * image.num_rows == image.num_tokens == len(found.tokens):
            raise ImageUnusable("the image's metadata turn it; its pixels must be turned instead")
        raise ImageMisfit("an image of this size takes other tokens here")


def _check_places(prompt: Sequence[int], images: Sequence[PromptImage], facts: ImageFacts) -> None:
    """Raises ImageMisfit, or ImageUnusable if vLLM would take two images for one."""
    for image in images:
        expected = facts.tokens_of(image.num_tokens)
        if tuple(prompt[image.position : image.end]) != expected:
            raise ImageMisfit("the prompt has other tokens for its images than the model here")
        if bool(image.num_rows) != (facts.grid is not None):
            raise ImageMisfit("only one of the prompt's model and this model has images in rows")
    if facts.grid is not None and any(a.end == b.position for a, b in pairwise(images)):
        # The code of transformers looks for images in the tokens, and the step would fail.
        raise ImageUnusable("two images stand side by side: a text must be between them")


def _rows_of(image: PromptImage, merge_size: int) -> Any:
    """An image's grid without the pixels, of vLLM's own type.

    With M-RoPE, the positions of all tokens after an image depend on the grid. So a decode needs
    the grid to compute the answer. vLLM's scheduler also gives only the grid to a worker that
    already has the image's KV.
    """
    import torch
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalKwargsItem,
    )

    num_columns = image.num_tokens // image.num_rows
    grid = torch.tensor([1, image.num_rows * merge_size, num_columns * merge_size])
    return MultiModalKwargsItem(
        {GRID: MultiModalFieldElem(grid, MultiModalBatchedField(keep_on_cpu=True))}
    )


def _check_wanted(is_cancelled: Callable[[], bool]) -> None:
    if is_cancelled():
        raise EngineFailed("it was given up")


def _places(images: Sequence[PromptImage]) -> list[Any]:
    from vllm.multimodal.inputs import PlaceholderRange

    return [PlaceholderRange(offset=i.position, length=i.num_tokens) for i in images]
