"""Names the owner of KV: a tenant under one salt, which is a value from the client.

A hold, which keeps a block for a paused session, belongs to the tenant, whatever its salts.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Final

OWNER_BYTES: Final = 8


@functools.lru_cache(maxsize=1024)
def owner_of(cache_salt: str) -> bytes:
    """A digest of the owner's `cache_salt`.

    In the mesh, a block's `cache_salt` is the key under which block names are hashed, in hex. The
    key itself must never be written to disk. For a hold, `cache_salt` is a digest of the tenant.
    """
    return hashlib.blake2b(
        cache_salt.encode(), digest_size=OWNER_BYTES, person=b"pdmesh-kv"
    ).digest()
