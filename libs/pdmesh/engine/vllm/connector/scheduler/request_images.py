"""The images of a vLLM request: their places and names, and whether the engine has them.

A decode has no pixels of an image, since it pulls the image's KV. If vLLM preempts the request, the
KV is lost, and without pixels vLLM would compute wrong KV. So such a request fails here, and the
gateway has it computed by an instance that gets the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdmesh.core.kv.prefix.block_hash import ImageAt
from pdmesh.engine.vllm.images.processing import GRID


def images_at(request: Any) -> Sequence[ImageAt]:
    """The images' places and digests. An adapter's name may stand before a digest.

    Any: vLLM's request.
    """
    return [
        (feature.mm_position.offset, bytes.fromhex(feature.identifier.rpartition(":")[2]))
        for feature in request.mm_features or ()
    ]


def num_without_image(request: Any, num_computed_tokens: int) -> int:
    """How many tokens after the computed ones cannot be computed here: an image is missing."""
    ends = [
        feature.mm_position.offset + feature.mm_position.length
        for feature in request.mm_features or ()
        if not _has_pixels(feature.data)
    ]
    return max(0, max(ends, default=0) - num_computed_tokens)


def _has_pixels(data: Any) -> bool:
    """Any: vLLM's type, or None. A decode has at most the grid of an image's patches."""
    return data is not None and set(data) != {GRID}
