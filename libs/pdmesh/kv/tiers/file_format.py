"""The file format of one KV block: a fixed header, then the block's bytes. Little-endian.

The header has the block's name, its identity (a digest of model fingerprint and rank), its length
and two checksums. A reader checks all of these. A file that is cut or changed anywhere fails at
least one check.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from pdmesh.core.kv.prefix.block_hash import HASH_BYTES
from pdmesh.kv.transport.base import ByteArray

MAGIC: Final = b"pdmeshkv"
VERSION: Final = 1
IDENTITY_BYTES: Final = 16
CHECKSUM_BYTES: Final = 16

# magic, version, reserved, name, identity, payload length, payload xxh3-128
_FIELDS: Final = struct.Struct(f"<8sII{HASH_BYTES}s{IDENTITY_BYTES}sQ{CHECKSUM_BYTES}s")
_SEAL: Final = struct.Struct("<Q")  # xxh3-64 of the fields
HEADER_BYTES: Final = _FIELDS.size + _SEAL.size


class BadBlockFile(Exception):
    """The file does not hold the expected block. The message names the first fault."""


@dataclass(frozen=True, slots=True)
class BlockHeader:
    name: bytes
    identity: bytes
    num_bytes: int
    checksum: bytes


def identity_of(model_fingerprint: str, rank: int, num_ranks: int) -> bytes:
    """A digest of model, layout and rank. It keeps blocks of different ranks and models apart."""
    text = f"{model_fingerprint}/{rank}/{num_ranks}"
    return hashlib.blake2b(text.encode(), digest_size=IDENTITY_BYTES).digest()


def checksum_of(data: ByteArray) -> bytes:
    return xxhash.xxh3_128_digest(data.data)


def pack_header(header: BlockHeader) -> bytes:
    fields = _FIELDS.pack(
        MAGIC, VERSION, 0, header.name, header.identity, header.num_bytes, header.checksum
    )
    return fields + _SEAL.pack(xxhash.xxh3_64_intdigest(fields))


def check_header(data: bytes, name: bytes, identity: bytes, num_bytes: int) -> BlockHeader:
    """Parse a header. Raises BadBlockFile if it is damaged, of another version, or not the header
    of the block with this name, identity and length.
    """
    if len(data) != HEADER_BYTES:
        raise BadBlockFile("cut within the header")
    fields = data[: _FIELDS.size]
    (seal,) = _SEAL.unpack_from(data, _FIELDS.size)
    if xxhash.xxh3_64_intdigest(fields) != seal:
        raise BadBlockFile("wrong checksum of the header")
    magic, version, _, found, owner, length, checksum = _FIELDS.unpack(fields)
    if magic != MAGIC or version != VERSION:
        raise BadBlockFile("not a block file of this version")
    if found != name:
        raise BadBlockFile("it has another block's name")
    if owner != identity:
        raise BadBlockFile("it is of another model or rank")
    if length != num_bytes:
        raise BadBlockFile("it has another length")
    return BlockHeader(found, owner, length, checksum)
