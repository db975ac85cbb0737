"""An image in a prompt, and the tokens that stand for it.

A chat template writes one placeholder for an image. In the prompt, tokens of the model replace it.
Their number is fixed by the model, or depends on the image's size. So the length of a prompt is
known before anything is computed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pdmesh.core.images.token_grid import GridRule
from pdmesh.errors import InvalidRequest

DIGEST_BYTES: Final = hashlib.sha256().digest_size
MAX_EXPANSION: Final = 16_384  # tokens of one image
MAX_IMAGES: Final = 64  # in a prompt, whatever a model says of itself


class ImagePlace(NamedTuple):
    """`num_rows`: how many rows the image's tokens form; 0: the model has no rows of tokens."""

    position: int
    num_tokens: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """How a model takes images. `placeholder`: the token that its template writes for an image.

    With a `grid`, an image takes the placeholder as often as its size asks for, and `expansion` is
    empty. Without one, every image takes `expansion`.
    """

    placeholder: int
    expansion: tuple[int, ...]
    max_images: int  # in a prompt
    grid: GridRule | None = None

    def tokens_of(self, num_tokens: int) -> tuple[int, ...]:
        """The token ids that stand for an image; `num_tokens`: the number that `place_of` gives."""
        return self.expansion if self.grid is None else (self.placeholder,) * num_tokens

    def place_of(self, width: int, height: int, position: int = 0) -> ImagePlace:
        """The place of an image of this size, in pixels, that begins at `position`."""
        if self.grid is None:
            return ImagePlace(position, len(self.expansion), 0)
        rows, columns = self.grid.grid_of(width, height)
        return ImagePlace(position, rows * columns, rows)


@dataclass(frozen=True, slots=True)
class PromptImage:
    """`num_tokens` tokens from `position` on stand for the image with this SHA-256.

    Only instances that compute the prompt get the `data`. Every instance needs `num_rows`: the
    positions of an answer's tokens depend on it. See `ImagePlace`.
    """

    position: int
    num_tokens: int
    digest: bytes
    data: bytes = field(default=b"", repr=False)
    num_rows: int = 0

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.position + self.num_tokens


def digest_of(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def check_placeholders(tokens: array[int], facts: ImageFacts, num_images: int) -> None:
    """Raises InvalidRequest if there is not one placeholder for each image."""
    found = tokens.count(facts.placeholder)
    if found != num_images:
        raise InvalidRequest(
            f"the messages have {num_images} images, and the prompt has {found} places for them: "
            "the model's tag for an image must not be written as text"
        )


def least_length(num_tokens: int, facts: ImageFacts, num_images: int) -> int:
    """The least length of a prompt that has `num_tokens` before its placeholders are expanded."""
    return num_tokens + num_images * max(0, len(facts.expansion) - 1)


def expanded(
    tokens: array[int], facts: ImageFacts, sizes: Sequence[tuple[int, int]]
) -> tuple[array[int], list[ImagePlace]]:
    """The prompt with its placeholders expanded, and where each image is in it.

    `sizes`: the width and height of each image, in pixels. Raises InvalidRequest as
    `check_placeholders` does.
    """
    check_placeholders(tokens, facts, len(sizes))
    prompt, places, done = array("I"), list[ImagePlace](), 0
    for width, height in sizes:
        at = tokens.index(facts.placeholder, done)
        prompt += tokens[done:at]
        place = facts.place_of(width, height, len(prompt))
        places.append(place)
        prompt.extend(facts.tokens_of(place.num_tokens))
        done = at + 1
    return prompt + tokens[done:], places
