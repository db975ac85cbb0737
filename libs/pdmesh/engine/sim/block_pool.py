"""The KV blocks of one instance: which are free, in use, or kept for their prefix (S80).

A block in use has references. A full block may also have a hash, and the beginning of any block may
have names (`core.kv.prefix.partial_blocks`). A block without references is kept until its memory is
needed and it is the least recently used. This is pure bookkeeping, without any bytes.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdmesh.core.kv.prefix.partial_block_names import NO_PARTIALS, PartialSampling
from pdmesh.core.kv.prefix.partial_blocks import PartialBlocks


@dataclass(frozen=True, slots=True)
class Tail:
    """The request's own block; it holds `num_tokens` tokens once they are copied from `source`.

    Without a `source`, they are there already.
    """

    block: int
    num_tokens: int
    source: int | None = None


@dataclass(slots=True)
class BlockPool:
    """`block_size` matters only for the names of beginnings, which `sampling` turns on."""

    num_blocks: int
    block_size: int = 0
    sampling: PartialSampling = NO_PARTIALS
    _free: list[int] = field(init=False)
    _references: list[int] = field(init=False)
    _hash_of: dict[int, bytes] = field(default_factory=dict)
    _block_of: dict[bytes, int] = field(default_factory=dict)
    _idle: OrderedDict[int, None] = field(default_factory=OrderedDict)  # cached, unreferenced, LRU
    _partials: PartialBlocks = field(init=False)
    stored: dict[bytes, None] = field(default_factory=dict)  # since `take_changes`
    removed: dict[bytes, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._references = [0] * self.num_blocks
        self._partials = PartialBlocks(self.sampling, self.block_size)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, including those kept for their prefix."""
        return len(self._free) + len(self._idle)

    def num_held(self, hashes: Sequence[bytes]) -> int:
        """Blocks of the longest stored prefix of `hashes`; takes no reference."""
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
        """`count` blocks with one reference each.

        It evicts the least recently used prefixes if needed.
        """
        assert count <= self.num_free, "admission reserves blocks before a job allocates them"
        blocks: list[int] = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        self._forget_names(self._partials.forget(block))
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
        """Make a full block findable. A second block of the same content stays anonymous.

        Its kept beginnings can no longer be appended to; `keep_partial` may name them again.
        """
        assert self._references[block] > 0
        self._forget_names(self._partials.forget(block))
        if block_hash in self._block_of or block in self._hash_of:
            return
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        self._learn_names([block_hash])

    # -- beginnings of blocks ---------------------------------------------------------------------

    def keep_partial(self, block: int, root: bytes, parent: bytes, data: bytes) -> None:
        """`block`, which the caller holds, has the tokens `data` after those of `parent`.

        From now on the block may be continued. This replaces what was kept of the block until now.
        A beginning that another block has already is not kept twice.
        """
        assert self._references[block] > 0
        self._forget_names(self._partials.forget(block))
        found = self._partials.find(root, parent, data)
        if found is None or found.num_tokens < len(data) // 4:
            self._learn_names(self._partials.keep(block, root, parent, data))

    def claim_partial(self, root: bytes, parent: bytes, data: bytes) -> Tail | None:
        """A block to append to, with one reference; it holds the longest beginning of `data`.

        None: there is no such block, or no room for a copy of it. A copy is needed if another
        request uses the block or if it holds further tokens.
        """
        found = self._partials.find(root, parent, data)
        if found is None:
            return None
        if self._references[found.block] == 0 and self._partials.may_append(found):
            self._refer(found.block)
            return Tail(found.block, found.num_tokens)
        self._refer(found.block)  # so that it is not evicted to make room for its own copy
        target = self.allocate(1)[0] if self.num_free else None
        self.release([found.block])
        if target is None:
            return None
        return Tail(target, found.num_tokens, found.block)

    # -- giving back ------------------------------------------------------------------------------

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each. The end of a prefix is evicted before its beginning."""
        for block in reversed(list(blocks)):
            self._references[block] -= 1
            assert self._references[block] >= 0
            if self._references[block] == 0:
                if block in self._hash_of or block in self._partials:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def take_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """(stored, removed) since the last call; a block that came and went is in neither."""
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
            assert block in self._hash_of or block in self._partials
        self._partials.check_invariants()
