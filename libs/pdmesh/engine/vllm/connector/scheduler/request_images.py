"""Reads the images of a vLLM request: their places and digests, and whether pixels are missing.

A decode pulls an image's KV and does not receive the image's pixels. If vLLM preempts the request,
the KV is lost, and without pixels vLLM would compute wrong KV. So the connector fails the request,
and the gateway sends it to an instance together with the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdmesh.core.kv.prefix.block_hash import ImageAt
from pdmesh.engine.vllm.images.processing import GRID


def images_at(request: Any) -> Sequence[ImageAt]:
    """Each image's first token position and digest.

    In an image's name in vLLM, the KV's owner and maybe an adapter's name precede the digest. Both
    are left out.
    """
    return [
        (feature.mm_position.offset, bytes.fromhex(feature.identifier.rpartition(":")[2]))
        for feature in request.mm_features or ()
    ]


def num_without_image(request: Any, num_computed_tokens: int) -> int:
    """The number of tokens from the next one to the end of the last image without pixels.

    They cannot be computed here.
    """
    ends = [
        feature.mm_position.offset + feature.mm_position.length
        for feature in request.mm_features or ()
        if not _has_pixels(feature.data)
    ]
    return max(0, max(ends, default=0) - num_computed_tokens)


def _has_pixels(data: Any) -> bool:
    """Whether an image's `data` has pixels. A decode has at most the grid of its patches."""
    return data is not None and set(data) != {GRID}
