"""Names the owner of KV. Blocks belong to a tenant under one salt, and holds to a tenant."""

from __future__ import annotations

import functools
import hashlib
from typing import Final

OWNER_BYTES: Final = 8


@functools.lru_cache(maxsize=1024)
def owner_of(cache_salt: str) -> bytes:
    """A digest of the salt. The salt itself must never be written, since it keys block names."""
    return hashlib.blake2b(
        cache_salt.encode(), digest_size=OWNER_BYTES, person=b"pdmesh-kv"
    ).digest()
