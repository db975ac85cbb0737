"""The images of a vLLM request, and whether this engine can compute them."""

from __future__ import annotations

from types import SimpleNamespace as Namespace
from typing import Any

import pytest

from pdmesh.engine.vllm.connector.scheduler.request_images import images_at, num_without_image
from pdmesh.engine.vllm.images.processing import GRID


def request(*images: tuple[int, int, bytes, object]) -> Any:
    """A request with these images. Each has a position, a number of tokens, a digest and data."""
    features = [
        Namespace(mm_position=Namespace(offset=at, length=size), identifier=digest.hex(), data=data)
        for at, size, digest, data in images
    ]
    return Namespace(mm_features=features or None)


def test_images_are_found_by_their_digests() -> None:
    asked = request((3, 5, b"a" * 32, None), (9, 5, b"b" * 32, None))
    asked.mm_features[1].identifier = f"adapter:owner:{asked.mm_features[1].identifier}"
    assert images_at(asked) == [(3, b"a" * 32), (9, b"b" * 32)]
    assert images_at(request()) == []


@pytest.mark.parametrize(("num_computed", "missing"), [(0, 14), (8, 6), (14, 0), (20, 0)])
def test_a_decode_cannot_compute_up_to_its_last_image(num_computed: int, missing: int) -> None:
    images = [(3, 5, b"a", None), (9, 5, b"b", None)]
    assert num_without_image(request(*images), num_computed) == missing
    rows_alone = [(at, size, digest, {GRID: 1}) for at, size, digest, _ in images]
    assert num_without_image(request(*rows_alone), num_computed) == missing
    pixels = {"pixel_values": 1, GRID: 1}
    with_data = [(at, size, digest, pixels) for at, size, digest, _ in images]
    assert num_without_image(request(*with_data), num_computed) == 0
    assert num_without_image(request(), num_computed) == 0
