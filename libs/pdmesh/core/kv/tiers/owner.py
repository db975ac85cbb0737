"""Names the owner of KV: of blocks, one tenant under one salt; of sessions' holds, one tenant."""

from __future__ import annotations

import functools
import hashlib
from typing import Final

OWNER_BYTES: Final = 8


@functools.lru_cache(maxsize=1024)
def owner_of(cache_salt: str) -> bytes:
    """A digest, since the salt is the key of the tenant's block names and must never be written."""
    return hashlib.blake2b(
        cache_salt.encode(), digest_size=OWNER_BYTES, person=b"pdmesh-kv"
    ).digest()
