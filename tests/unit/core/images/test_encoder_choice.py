"""Each image has an encoder, which it keeps while other encoders come and go."""

from __future__ import annotations

from pdmesh.core.images.encoder_choice import choose_encoder
from pdmesh.core.model import PeerId

ENCODERS = [PeerId(f"encoder-{i}", 1) for i in range(5)]
DIGESTS = [bytes([i]) * 32 for i in range(100)]


def test_without_encoders_there_is_none() -> None:
    assert choose_encoder([], DIGESTS[0]) is None


def test_all_gateways_choose_alike_whatever_order_they_see() -> None:
    chosen = [choose_encoder(ENCODERS, digest) for digest in DIGESTS]
    assert chosen == [choose_encoder(ENCODERS[::-1], digest) for digest in DIGESTS]
    assert set(chosen) == set(ENCODERS)


def test_only_the_images_of_an_encoder_that_leaves_change_theirs() -> None:
    gone = ENCODERS[2]
    for digest in DIGESTS:
        before = choose_encoder(ENCODERS, digest)
        after = choose_encoder([e for e in ENCODERS if e != gone], digest)
        assert (after == before) == (before != gone)


def test_a_new_incarnation_keeps_the_images_of_its_instance() -> None:
    again = [PeerId(e.instance_id, 7) for e in ENCODERS]
    for digest in DIGESTS:
        before, after = choose_encoder(ENCODERS, digest), choose_encoder(again, digest)
        assert before is not None
        assert after is not None
        assert before.instance_id == after.instance_id
