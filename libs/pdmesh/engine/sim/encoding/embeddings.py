"""The embeddings that a simulated encoder makes: bytes that depend only on the image."""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np

from pdmesh.core.images.prompt_image import PromptImage
from pdmesh.kv.transport.base import ByteArray

_TOKEN_BYTES: Final = 8


def sim_embedding(image: PromptImage) -> ByteArray:
    made = hashlib.shake_128(image.digest).digest(image.num_tokens * _TOKEN_BYTES)
    return np.frombuffer(made, np.uint8)


def empty_like_embedding(image: PromptImage) -> ByteArray:
    return np.zeros(image.num_tokens * _TOKEN_BYTES, np.uint8)
