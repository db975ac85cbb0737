"""Names a KV block: a keyed, chained 128-bit hash of the tokens up to its end (S80).

Equal hashes mean equal KV, so the hash must not collide even on purpose: two tenants with one hash
would share each other's cache. Hence it is a keyed cryptographic chain (BLAKE2b). Its root binds
the tenant, the salt, the model fingerprint (model, dtype, block size, layout), and the content of
an adapter. The name of a block also binds the images that begin before the block's end.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Final

HASH_BYTES = 16
# The position of an image's first token in the prompt, and the image's digest.
ImageAt = tuple[int, bytes]
_IMAGE: Final = b"image"


def token_array(token_ids: Iterable[int]) -> array[int]:
    """Token ids as an array of uint32, the form in which they travel inside the mesh."""
    return array("I", token_ids)


def tokens_to_bytes(token_ids: Sequence[int]) -> bytes:
    """Little-endian uint32 each, as in `Prefill.prompt_token_ids`."""
    values = token_ids if isinstance(token_ids, array) else array("I", token_ids)
    if sys.byteorder == "big":
        values = array("I", values)
        values.byteswap()
    return values.tobytes()


def tokens_from_bytes(data: bytes) -> array[int]:
    """The inverse of `tokens_to_bytes`. Raises ValueError if the length is not a multiple of 4."""
    values = array("I")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


@functools.lru_cache(maxsize=1024)  # needed with every request, and nearly always the same
def tenant_root(
    secret: bytes, tenant: str, salt: str, model_fingerprint: str, adapter: str = ""
) -> bytes:
    """The key of one tenant's chain under one model. `secret` is the deployment's own.

    `adapter`: digest of the LoRA adapter that changes the model.
    """
    parts = (tenant, salt, model_fingerprint, *((adapter,) if adapter else ()))
    message = b"".join(len(p.encode()).to_bytes(4, "little") + p.encode() for p in parts)
    return hmac.digest(secret, message, "sha256")[:HASH_BYTES]


def block_hashes(
    root: bytes,
    token_ids: Sequence[int],
    block_size: int,
    parent: bytes = b"",
    images: Sequence[ImageAt] = (),
) -> list[bytes]:
    """Hashes of the full blocks of `token_ids`, in order; a partial tail has none.

    `parent`: the hash of the preceding block, if the chain's earlier blocks are hashed already.

    `images`: those that begin within `token_ids`, in order. Token ids do not tell images apart, so
    the digest of an image is hashed with the block in which it begins. The chain carries it on.
    """
    data = tokens_to_bytes(token_ids)
    step = 4 * block_size
    hashes: list[bytes] = []
    by_block: dict[int, bytes] = {}
    for position, image in images:
        start = position // block_size * step
        place = _IMAGE + (position % block_size).to_bytes(4, "little")
        by_block[start] = by_block.get(start, b"") + place + image
    # Copying a keyed hash object takes half the time of making one.
    copy = hashlib.blake2b(digest_size=HASH_BYTES, key=root).copy
    for start in range(0, len(data) - step + 1, step):
        digest = copy()
        digest.update(parent + data[start : start + step])
        if start in by_block:
            digest.update(by_block[start])
        parent = digest.digest()
        hashes.append(parent)
    return hashes
