"""Names a KV block by a keyed, chained 128-bit hash of all tokens up to the block's end (S80).

Blocks with equal names are taken to have equal KV. A collision, even a deliberate one, would let
two tenants share KV, so each block is hashed with BLAKE2b under a secret key, the root of the
chain. The root is derived from the mesh's secret, the tenant, a salt that the client may send, the
content of a LoRA adapter, and the model fingerprint. The fingerprint covers the model, its dtype,
the block size and the layout. The name of a block also depends on the images that begin before the
block's end.
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
# The position of an image's first token among the tokens, and the image's digest.
ImageAt = tuple[int, bytes]
_IMAGE: Final = b"image"


def token_array(token_ids: Iterable[int]) -> array[int]:
    """Token ids as an array of uint32."""
    return array("I", token_ids)


def tokens_to_bytes(token_ids: Sequence[int]) -> bytes:
    """Each token id as a little-endian uint32, the format of `Prefill.prompt_token_ids`."""
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


@functools.lru_cache(maxsize=1024)  # each request calls it, nearly always with the same arguments
def tenant_root(
    secret: bytes, tenant: str, salt: str, model_fingerprint: str, adapter: str = ""
) -> bytes:
    """The key for the block names of one tenant under one model.

    `secret` is the mesh's secret. `adapter` is the digest of the LoRA adapter that changes the
    model, or empty.
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
    """The hashes of the full blocks of `token_ids`, in order. A partial last block has no hash.

    If the chain's earlier blocks are hashed already, `parent` is the hash of the preceding block.

    `images` lists in order the images that begin within `token_ids`. Different images have the
    same token ids. The digest of an image is therefore hashed with the block in which the image
    begins, and the chain makes all later hashes depend on it.
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
