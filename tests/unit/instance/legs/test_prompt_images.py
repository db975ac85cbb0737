"""The images in a command must be in order and within the prompt.

Only a prefill gets their data.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.images.prompt_image import MAX_IMAGES, PromptImage, digest_of
from pdmesh.errors import InvalidRequest
from pdmesh.instance.legs.convert import images_from_proto
from pdmesh.services.gateway.request.leg_commands import images_to_proto
from pdmesh.v1.instance_service_pb2 import Prefill, Start

ONE = PromptImage(2, 4, digest_of(b"a"), b"a")
TWO = PromptImage(6, 4, digest_of(b"b"), b"b")


def test_a_prefill_gets_the_images_and_a_decode_their_digests() -> None:
    images = (ONE, TWO)
    prefill = Prefill(images=images_to_proto(images, with_data=True))
    assert images_from_proto(prefill, 10) == images
    start = Start(images=images_to_proto(images, with_data=False))
    assert images_from_proto(start, 10) == tuple(replace(i, data=b"") for i in images)


@pytest.mark.parametrize(
    "images",
    [
        (TWO, ONE), (ONE, ONE), (replace(ONE, num_tokens=0),), (replace(ONE, num_tokens=9),),
        (replace(ONE, digest=b"short"),), (replace(ONE, data=b""),),
        tuple(PromptImage(at, 1, ONE.digest, b"a") for at in range(MAX_IMAGES + 1)),
    ],
)  # fmt: skip
def test_other_images_are_refused(images: tuple[PromptImage, ...]) -> None:
    num_tokens = 10 if len(images) < 9 else 1000
    with pytest.raises(InvalidRequest) as refused:
        images_from_proto(Prefill(images=images_to_proto(images, with_data=True)), num_tokens)
    assert refused.value.field == "images"


def test_a_decode_takes_no_data() -> None:
    with pytest.raises(InvalidRequest, match="decodes do not"):
        images_from_proto(Start(images=images_to_proto((ONE,), with_data=True)), 10)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=5))
def test_accepted_images_never_overlap(places: list[tuple[int, int]]) -> None:
    images = [PromptImage(at, size, ONE.digest, b"a") for at, size in places]
    try:
        found = images_from_proto(Prefill(images=images_to_proto(images, with_data=True)), 40)
    except InvalidRequest:
        return
    taken = [
        at for image in found for at in range(image.position, image.position + image.num_tokens)
    ]
    assert sorted(set(taken)) == taken
    assert all(at < 40 for at in taken)
