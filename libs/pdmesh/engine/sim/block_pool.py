"""The simulated engine's record of which KV blocks are free, in use, or cached (S80).

A block in use has references. A full block may also have a hash, by which later prompts with the
same prefix find it. A block with a hash stays cached after its last reference is dropped. If memory
is needed, the least recently used of these blocks is evicted. This module handles block numbers,
not the blocks' bytes.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockPool:
    num_blocks: int
    _free: list[int] = field(init=False)
    _references: list[int] = field(init=False)
    _hash_of: dict[int, bytes] = field(default_factory=dict)
    _block_of: dict[bytes, int] = field(default_factory=dict)
    # Blocks with a hash and no references, the least recently used first.
    _idle: OrderedDict[int, None] = field(default_factory=OrderedDict)
    # The hashes that were stored and removed since the last `take_changes`.
    stored: dict[bytes, None] = field(default_factory=dict)
    removed: dict[bytes, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._references = [0] * self.num_blocks

    @property
    def num_free(self) -> int:
        """The number of blocks that `allocate` can hand out, including the cached ones."""
        return len(self._free) + len(self._idle)

    def num_held(self, hashes: Sequence[bytes]) -> int:
        """The length of the longest stored prefix of `hashes`, in blocks. Takes no reference."""
        held = (block_hash in self._block_of for block_hash in hashes)
        return sum(1 for _ in itertools.takewhile(bool, held))

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Take a reference to each block of the longest stored prefix of `hashes`."""
        blocks: list[int] = []
        for block_hash in hashes:
            if (block := self._block_of.get(block_hash)) is None:
                break
            self._refer(block)
            blocks.append(block)
        return blocks

    def _refer(self, block: int) -> None:
        if self._references[block] == 0:
            del self._idle[block]
        self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with one reference each. Evicts cached blocks if needed."""
        assert count <= self.num_free, "admission reserves blocks before a job allocates them"
        blocks: list[int] = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        if (block_hash := self._hash_of.pop(block, None)) is not None:
            del self._block_of[block_hash]
            self._forget_names([block_hash])
        return block

    def _learn_names(self, names: Iterable[bytes]) -> None:
        for name in names:
            if name in self.removed:
                del self.removed[name]
            else:
                self.stored[name] = None

    def _forget_names(self, names: Iterable[bytes]) -> None:
        for name in names:
            if name in self.stored:
                del self.stored[name]
            else:
                self.removed[name] = None

    def store(self, block: int, block_hash: bytes) -> None:
        """Give a full block its hash.

        Do nothing if it has one already, or another block has this hash.
        """
        assert self._references[block] > 0
        if block_hash in self._block_of or block in self._hash_of:
            return
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        self._learn_names([block_hash])

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block of a sequence.

        The last blocks become idle first, so that the end of a prefix is evicted before its
        beginning.
        """
        for block in reversed(list(blocks)):
            self._references[block] -= 1
            assert self._references[block] >= 0
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def take_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Return the hashes that were stored and removed since the last call.

        A hash that was stored and removed in between is in neither.
        """
        changes = tuple(self.stored), tuple(self.removed)
        self.stored.clear()
        self.removed.clear()
        return changes

    def check_invariants(self) -> None:
        used = {b for b, count in enumerate(self._references) if count}
        assert len(set(self._free)) == len(self._free)
        assert not used & (set(self._free) | set(self._idle))
        assert not set(self._free) & set(self._idle)
        assert len(self._free) + len(self._idle) + len(used) == self.num_blocks
        assert {h: b for b, h in self._hash_of.items()} == self._block_of
        for block in self._idle:
            assert block in self._hash_of
