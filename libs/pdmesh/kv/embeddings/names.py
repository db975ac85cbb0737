"""The names of image embeddings.

A name includes the owner of the image, so tenants share no embeddings. Otherwise a tenant could
find out, from the time that an answer takes, which images another tenant sends.
"""

from __future__ import annotations

import hashlib

from pdmesh.core.kv.tiers.owner import owner_of


def identifier_of(cache_salt: str, digest: bytes) -> str:
    """The name of an image within an engine. It consists of the owner and the image's SHA-256."""
    return f"{owner_of(cache_salt).hex()}:{digest.hex()}"


def embedding_name(identifier: str) -> bytes:
    """The name by which another instance fetches an image's embeddings."""
    return hashlib.blake2b(identifier.encode(), digest_size=16, person=b"pdmesh-emb").digest()
