"""The names of embeddings. The owner comes first, so that a tenant cannot learn from the time of
an answer which images another tenant sends.
"""

from __future__ import annotations

import hashlib

from pdmesh.core.kv.tiers.owner import owner_of


def identifier_of(cache_salt: str, digest: bytes) -> str:
    """The name of an image within an engine: its owner and its SHA-256."""
    return f"{owner_of(cache_salt).hex()}:{digest.hex()}"


def embedding_name(identifier: str) -> bytes:
    """The name under which an image's embeddings are fetched."""
    return hashlib.blake2b(identifier.encode(), digest_size=16, person=b"pdmesh-emb").digest()
