"""Decides which encoder instance makes the embeddings of a prompt's images.

All gateways send an image to the same encoder, as long as that encoder takes requests. So the image
is encoded once, and later prompts find its embeddings there (S130). The first image of a prompt
decides for all of the prompt's images, because a conversation keeps its earlier images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from pdmesh.core.model import PeerId


def choose_encoder(encoders: Iterable[PeerId], digest: bytes) -> PeerId | None:
    """The encoder with the highest weight for this image (rendezvous hashing), or None if there is
    none.

    When an encoder joins or leaves, only the images of that encoder get another encoder.
    """
    return max(encoders, key=lambda encoder: _weight(encoder, digest), default=None)


def _weight(encoder: PeerId, digest: bytes) -> tuple[bytes, PeerId]:
    name = encoder.instance_id.encode()
    return hashlib.blake2b(digest + name, digest_size=8, person=b"pdmesh-enc").digest(), encoder
