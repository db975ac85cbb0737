"""Decides which image embeddings an encoder keeps within a bound of bytes, and which it evicts.

The least recently used embedding is evicted first. An embedding that is being read is never
evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Entry:
    num_bytes: int
    num_readers: int = 0


@dataclass(slots=True)
class EmbeddingLru:
    """Names and sizes of embeddings. The caller keeps the bytes, and drops those of evicted
    names.
    """

    max_bytes: int
    num_bytes: int = 0
    _held: OrderedDict[bytes, _Entry] = field(default_factory=OrderedDict)  # the last used is last

    def __contains__(self, name: bytes) -> bool:
        return name in self._held

    def __len__(self) -> int:
        return len(self._held)

    def add(self, name: bytes, num_bytes: int) -> Sequence[bytes] | None:
        """Add an embedding, and return the names that are evicted for it.

        If there is too little room even after all possible evictions, return None and change
        nothing.
        """
        if name in self._held:
            self._held.move_to_end(name)
            return ()
        leaving: list[bytes] = []
        free = self.max_bytes - self.num_bytes
        for other, entry in self._held.items():
            if free >= num_bytes:
                break
            if not entry.num_readers:
                leaving.append(other)
                free += entry.num_bytes
        if free < num_bytes:
            return None
        for other in leaving:
            self.num_bytes -= self._held.pop(other).num_bytes
        self._held[name] = _Entry(num_bytes)
        self.num_bytes += num_bytes
        return leaving

    def pin(self, names: Sequence[bytes]) -> Sequence[bytes]:
        """Return the longest beginning of `names` whose embeddings are all held.

        These embeddings are kept until `unpin`.
        """
        found: list[bytes] = []
        for name in names:
            if (entry := self._held.get(name)) is None:
                break
            entry.num_readers += 1
            self._held.move_to_end(name)
            found.append(name)
        return found

    def unpin(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._held[name].num_readers -= 1

    def check_invariants(self) -> None:
        assert self.num_bytes == sum(entry.num_bytes for entry in self._held.values())
        assert 0 <= self.num_bytes <= self.max_bytes
        assert all(entry.num_readers >= 0 for entry in self._held.values())
