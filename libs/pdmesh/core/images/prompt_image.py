"""An image in a prompt, and the tokens that stand for it.

A chat template writes one placeholder for an image. In the prompt, the model's `expansion` takes
its place. Every image of a model takes the same tokens, so that the length of a prompt is known
before anything is computed.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from typing import Final

from pdmesh.errors import InvalidRequest

DIGEST_BYTES: Final = hashlib.sha256().digest_size
MAX_EXPANSION: Final = 16_384  # tokens of one image
MAX_IMAGES: Final = 64  # in a prompt, whatever a model says of itself


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """How a model takes images. `placeholder`: the token that its template writes for an image."""

    placeholder: int
    expansion: tuple[int, ...]
    max_images: int  # in a prompt


@dataclass(frozen=True, slots=True)
class PromptImage:
    """`num_tokens` tokens from `position` on stand for the image with this SHA-256.

    Only those that compute a prompt get its images' bytes.
    """

    position: int
    num_tokens: int
    digest: bytes
    data: bytes = field(default=b"", repr=False)

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.position + self.num_tokens


def digest_of(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def expanded(
    tokens: array[int], facts: ImageFacts, num_images: int
) -> tuple[array[int], list[int]]:
    """The prompt with its placeholders expanded, and where each image begins in it.

    Raises InvalidRequest if there is not one placeholder for each image.
    """
    found = tokens.count(facts.placeholder)
    if found != num_images:
        raise InvalidRequest(
            f"the messages have {num_images} images, and the prompt has {found} places for them: "
            "the model's tag for an image must not be written as text"
        )
    prompt, positions, done = array("I"), [], 0
    for _ in range(num_images):
        at = tokens.index(facts.placeholder, done)
        prompt += tokens[done:at]
        positions.append(len(prompt))
        prompt.extend(facts.expansion)
        done = at + 1
    return prompt + tokens[done:], positions
