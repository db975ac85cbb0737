"""The image embeddings of an encoder, which prefills fetch by name.

The pool is a `BlockSource` of the encoder's KV agent. The engine's thread adds embeddings, and the
agent's thread lends them to peers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.core.images.embedding_lru import EmbeddingLru
from pdmesh.kv.agent.types import PinnedBlocks
from pdmesh.kv.transport.base import ByteArray


@dataclass(frozen=True, slots=True)
class _LentEmbeddings(PinnedBlocks):
    names: Sequence[bytes] = ()


class EmbeddingPool:
    def __init__(self, max_bytes: int) -> None:
        self._lru = EmbeddingLru(max_bytes)
        self._data: dict[bytes, ByteArray] = {}
        self._lock = threading.Lock()

    def __contains__(self, name: bytes) -> bool:
        with self._lock:
            return name in self._lru

    @property
    def num_bytes(self) -> int:
        return self._lru.num_bytes

    def add(self, name: bytes, data: ByteArray) -> Sequence[bytes] | None:
        """Add embeddings. Returns the names of the evicted ones, or None if there is no room.

        `data` must not change any more.
        """
        with self._lock:
            left = self._lru.add(name, data.size)
            if left is not None:
                self._data[name] = data
                for other in left:
                    del self._data[other]
            return left

    def open(self, names: Sequence[bytes]) -> PinnedBlocks | None:
        """Pin the embeddings of `names`, up to the first one that is missing or has another size.

        All views of one fetch must have the same length.
        """
        with self._lock:
            held = self._lru.pin(names)
            num = next(
                (i for i, n in enumerate(held) if self._size(n) != self._size(held[0])), None
            )
            found = held[:num]
            self._lru.unpin(held[len(found) :])
            views = [self._data[name] for name in found]
        return _LentEmbeddings(views, (), found) if found else None

    def close(self, pinned: PinnedBlocks) -> None:
        assert isinstance(pinned, _LentEmbeddings)
        with self._lock:
            self._lru.unpin(pinned.names)

    def _size(self, name: bytes) -> int:
        return self._data[name].size

    def check_invariants(self) -> None:
        self._lru.check_invariants()
        assert len(self._data) == len(self._lru)
        assert all(name in self._lru for name in self._data)
