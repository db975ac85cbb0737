"""Decodes one image, and runs the model's image processor on it in vLLM."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

from pdmesh.core.images.header import NotAnImage, read_header
from pdmesh.core.images.image_bounds import MAX_PIXELS, misfit_of
from pdmesh.errors import ImageUnusable

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

IMAGE: Final = "image"  # vLLM's name of this kind of input
GRID: Final = "image_grid_thw"  # vLLM's key for an image's frames, rows and columns of patches


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """A processor's result for a prompt that is one image. Any stands for types of vLLM."""

    tokens: tuple[int, ...]
    item: Any
    place: Any

    @property
    def is_whole(self) -> bool:
        """Whether all of the tokens stand for the image."""
        return (self.place.offset, self.place.length) == (0, len(self.tokens))

    def num_rows(self, merge_size: int) -> int:
        """The number of rows of tokens. A token stands for `merge_size` by `merge_size` patches."""
        _, num_rows, _ = self.item[GRID].data.tolist()
        return int(num_rows) // merge_size


def processing(llm: AsyncLLM, placeholder: int, picture: Any) -> Future[Any]:
    """Process one image with vLLM's processor, in the only thread in which vLLM runs it.

    Some processors crash if two threads run them at once.
    """
    renderer, images = llm.renderer, {IMAGE: [picture]}
    submit = renderer._mm_executor.submit
    found: Future[Any] = submit(renderer._process_multimodal, [placeholder], images, None, None)
    return found


def processed(made: Any) -> ProcessedImage:
    """`made` is the result of `processing`."""
    (item,), (place,) = made["mm_kwargs"][IMAGE], made["mm_placeholders"][IMAGE]
    return ProcessedImage(tuple(made["prompt_token_ids"]), item, place)


def merge_size_of(hf_config: Any) -> int:
    """The side of the square of patches that one token stands for, in patches. 0 if unknown.

    `hf_config` has the model's own type.
    """
    size = getattr(getattr(hf_config, "vision_config", None), "spatial_merge_size", 0)
    return size if isinstance(size, int) else 0


def decoded(data: bytes) -> Any:
    """The picture, of PIL's type, as plain vLLM reads it. Raises ImageUnusable."""
    from vllm.multimodal.image import convert_image_mode, normalize_image

    image = opened(data)
    try:
        image = normalize_image(image)
        image.load()
        return convert_image_mode(image, "RGB")
    except Exception as error:  # noqa: BLE001  PIL's decoders raise many kinds of errors
        raise _not_decoded(error) from None


def opened(data: bytes) -> Any:
    """The picture, of PIL's type, before its pixels are decoded. Raises ImageUnusable.

    Only the decoder of the header's format is tried. The picture's size must be the header's,
    because only the header's size was checked.
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
