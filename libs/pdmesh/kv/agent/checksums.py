"""Checksums of KV bytes: xxh3_128 in the host's memory, `kv.device.digest` in a GPU's memory.

Either kind of checksum can be computed in either memory, but the wrong kind is slower. Callers hash
more than HASH_HERE_BYTES on a thread, beside the event loop. xxhash releases the GIL.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

import xxhash

from pdmesh.kv.device.digest import digest
from pdmesh.kv.transport.base import KvBytes
from pdmesh.kv.transport.device_bytes import DeviceBytes

HASH_HERE_BYTES = 8 << 20  # 0.1 ms in the best case


class ChecksumKind(IntEnum):
    """The algorithm that made the checksums of a META message (`kv.agent.wire`)."""

    XXH3 = 0  # xxh3_128
    WORDS = 1  # `kv.device.digest`


def checksum(data: KvBytes) -> bytes:
    """A checksum of the kind that is fastest in the memory of `data` (see `kind_of`)."""
    return _checksum(data, kind_of(data))


def kind_of(data: KvBytes) -> ChecksumKind:
    return ChecksumKind.WORDS if isinstance(data, DeviceBytes) else ChecksumKind.XXH3


def _checksum(data: KvBytes, kind: ChecksumKind) -> bytes:
    if isinstance(data, DeviceBytes):
        if kind is ChecksumKind.WORDS:
            return data.checksum()
        return xxhash.xxh3_128_digest(data.to_host())
    return digest(data) if kind is ChecksumKind.WORDS else xxhash.xxh3_128_digest(data.data)


def fingerprint_hash(fingerprint: str) -> int:
    return xxhash.xxh3_64_intdigest(fingerprint.encode())


def group_hash(group_id: str) -> int:
    return xxhash.xxh3_64_intdigest(group_id.encode())


def decode_hash(instance_id: str, incarnation: int, leg: int) -> int:
    """A number for one leg (one request's stay) on one decode.

    All ranks of the decode compute the same number. Other legs and other decodes get other numbers.
    """
    return xxhash.xxh3_64_intdigest(f"{instance_id}/{incarnation}/{leg}".encode())


def are_intact(
    buffers: Sequence[KvBytes],
    checksums: Iterable[bytes],
    kind: ChecksumKind = ChecksumKind.XXH3,
) -> bool:
    """Whether each buffer matches its checksum of this kind."""
    pairs = zip(buffers, checksums, strict=True)
    return all(_checksum(data, kind) == expected for data, expected in pairs)
