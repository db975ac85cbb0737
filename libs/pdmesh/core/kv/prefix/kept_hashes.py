"""Keeps the block hashes of long prompts, in chunks, for later prompts that begin alike.

A chat's next turn begins with the tokens of the turn before. A chunk has the hashes of 256 blocks.
Looking up a chunk takes a fifth of the time of hashing its blocks one by one. The name of a chunk
is a hash under the tenant's key, so different tenants share no chunk.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

from pdmesh.core.kv.prefix.block_hash import HASH_BYTES, block_hashes, tokens_to_bytes

CHUNK_BLOCKS: Final = 256
_MAX_CHUNKS: Final = 2048  # 8 million tokens in blocks of 16, about 26 MB
_PERSON: Final = b"chunk"


class KeptHashes:
    """The block hashes of `max_chunks` chunks. The least recently used chunk is dropped first."""

    def __init__(self, max_chunks: int = _MAX_CHUNKS) -> None:
        self._max_chunks = max_chunks
        self._kept: OrderedDict[bytes, list[bytes]] = OrderedDict()
        self.num_found = 0

    def __len__(self) -> int:
        return len(self._kept)

    def chunks(
        self, root: bytes, token_ids: Sequence[int], block_size: int
    ) -> Iterator[list[bytes]]:
        """The result of `block_hashes`, chunk by chunk. The last chunk may be short or empty."""
        data, parent = tokens_to_bytes(token_ids), b""
        step = CHUNK_BLOCKS * block_size
        for start in range(0, len(token_ids), step):
            tokens = token_ids[start : start + step]
            if len(tokens) < step:
                yield block_hashes(root, tokens, block_size, parent)
                return
            name = _name(root, parent, data[4 * start : 4 * (start + step)])
            if (found := self._kept.get(name)) is None:
                found = self._kept[name] = block_hashes(root, tokens, block_size, parent)
                if len(self._kept) > self._max_chunks:
                    self._kept.popitem(last=False)
            else:
                self.num_found += 1
                self._kept.move_to_end(name)
            parent = found[-1]
            yield found


def _name(root: bytes, parent: bytes, data: bytes) -> bytes:
    """A name that is unique among the chunks with the same `root`.

    The name is unique because `parent` is empty or a whole hash, and because all chunks of one
    block size have equally long `data`.
    """
    hashed = hashlib.blake2b(parent, digest_size=HASH_BYTES, key=root, person=_PERSON)
    hashed.update(data)
    return hashed.digest()
