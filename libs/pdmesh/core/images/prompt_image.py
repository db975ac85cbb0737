"""An image in a prompt, and the tokens that stand for it.

A chat template writes one placeholder token for each image. The gateway replaces the placeholder by
the tokens that stand for the image in the model. The model fixes their number, or computes it from
the image's size. So the length of a prompt is known before an engine computes anything.
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
MAX_EXPANSION: Final = 16_384  # the most tokens of one image
MAX_IMAGES: Final = 64  # in a prompt, even if a model allows more


class ImagePlace(NamedTuple):
    """Where an image's tokens are in a prompt.

    `num_rows` is the number of rows that the tokens form. It is 0 if the model does not arrange
    them in rows.
    """

    position: int
    num_tokens: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """How a model takes images.

    `placeholder` is the token that the model's chat template writes for an image. If the model has
    a `grid`, the placeholder is repeated according to the image's size, and `expansion` is empty.
    Otherwise the tokens `expansion` stand for every image.
    """

    placeholder: int
    expansion: tuple[int, ...]
    max_images: int  # in a prompt
    grid: GridRule | None = None

    def tokens_of(self, num_tokens: int) -> tuple[int, ...]:
        """The token ids that stand for an image. `num_tokens` is the number that `place_of` has
        returned.
        """
        return self.expansion if self.grid is None else (self.placeholder,) * num_tokens

    def place_of(self, width: int, height: int, position: int = 0) -> ImagePlace:
        """The place of an image in a prompt. `width` and `height` are in pixels."""
        if self.grid is None:
            return ImagePlace(position, len(self.expansion), 0)
        rows, columns = self.grid.grid_of(width, height)
        return ImagePlace(position, rows * columns, rows)


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt: `num_tokens` tokens from `position` on stand for it.

    `digest` is the SHA-256 of the image's data. Only instances that compute the prompt get the
    `data`. Every instance needs `num_rows` (see `ImagePlace`), because the positions of the
    answer's tokens depend on it.
    """

    position: int
    num_tokens: int
    digest: bytes
    data: bytes = field(default=b"", repr=False)
    num_rows: int = 0

    @property
    def end(self) -> int:
        """The position after the image's last token."""
        return self.position + self.num_tokens


def digest_of(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def check_placeholders(tokens: array[int], facts: ImageFacts, num_images: int) -> None:
    """Raises InvalidRequest unless the prompt has exactly one placeholder for each image."""
    found = tokens.count(facts.placeholder)
    if found != num_images:
        raise InvalidRequest(
            f"the messages have {num_images} images, and the prompt has {found} places for them: "
            "the model's tag for an image must not be written as text"
        )


def least_length(num_tokens: int, facts: ImageFacts, num_images: int) -> int:
    """The least length that a prompt of `num_tokens` has after its placeholders are expanded."""
    return num_tokens + num_images * max(0, len(facts.expansion) - 1)


def expanded(
    tokens: array[int], facts: ImageFacts, sizes: Sequence[tuple[int, int]]
) -> tuple[array[int], list[ImagePlace]]:
    """The prompt with its placeholders expanded, and the place of each image in it.

    `sizes` has the width and height of each image, in pixels. Raises InvalidRequest as
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
