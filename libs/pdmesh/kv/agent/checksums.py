"""xxh3_128 of ranges of bytes.

More than INLINE_BYTES at once are hashed beside the event loop (xxhash releases the GIL).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import xxhash

from pdmesh.kv.transport.base import ByteArray

INLINE_BYTES = 8 << 20  # 0.1 ms in the best case


def checksum(data: ByteArray) -> bytes:
    return xxhash.xxh3_128_digest(data.data)


def fingerprint_hash(fingerprint: str) -> int:
    return xxhash.xxh3_64_intdigest(fingerprint.encode())


def group_hash(group_id: str) -> int:
    return xxhash.xxh3_64_intdigest(group_id.encode())


def decode_hash(instance_id: str, incarnation: int, leg: int) -> int:
    """A number that all ranks of a decode share for one leg; other legs and decodes differ."""
    return xxhash.xxh3_64_intdigest(f"{instance_id}/{incarnation}/{leg}".encode())


def are_intact(buffers: Sequence[ByteArray], checksums: Iterable[bytes]) -> bool:
    """Whether each buffer has its checksum."""
    pairs = zip(buffers, checksums, strict=True)
    return all(checksum(data) == expected for data, expected in pairs)
