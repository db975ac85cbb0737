"""The life of KV blocks that may be cached before they are full (S104).

A full block is shared: it counts references and never changes. A partial one is exclusive: one request at a time owns it and
appends after its watermark; without an owner it is kept, and whoever continues exactly what it holds takes it over.
Whoever continues only its beginning, or finds it owned, gets a copy of that beginning in a block of its own. Appending leaves
what is below the watermark alone, so a block may be copied from while its owner goes on.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Block:
    watermark: int = 0  # tokens in it
    owner: int | None = None  # who appends; None for a full or a kept one
    references: int = 0  # of a full one
    copies: int = 0  # under way from it
    uses: int = 0  # times handed out, so that a name of an earlier content is known to be old


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the first `num_tokens` tokens of `source` to `target`, then say `copied`."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Claim:
    """The request's own block, which holds `num_tokens` tokens once `copy`, if any, is done."""

    block: int
    num_tokens: int
    copy: Copy | None = None


@dataclass(slots=True)
class BlockTable:
    """Requests are numbers. Illegal transitions are bugs and fail an assertion before anything changes."""

    num_blocks: int
    block_size: int  # tokens
    _blocks: list[_Block] = field(init=False)
    _free: list[int] = field(init=False)
    _idle: OrderedDict[int, None] = field(default_factory=OrderedDict)  # kept, LRU first

    def __post_init__(self) -> None:
        self._blocks = [_Block() for _ in range(self.num_blocks)]
        self._free = list(range(self.num_blocks - 1, -1, -1))

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out, those kept for their content included."""
        return len(self._free) + len(self._idle)

    def watermark(self, block: int) -> int:
        return self._blocks[block].watermark

    def version(self, block: int) -> int:
        """Changes whenever the block's content is given up: a name stays good for one version."""
        return self._blocks[block].uses

    def is_full(self, block: int) -> bool:
        return self._blocks[block].watermark == self.block_size

    # -- partial ----------------------------------------------------------------------------------

    def open(self, owner: int) -> int | None:
        """An empty block for `owner` to append to; forgets the least recently used content if it must. None: no room."""
        if self._free:
            number = self._free.pop()
        elif self._idle:
            number, _ = self._idle.popitem(last=False)
        else:
            return None
        block = self._blocks[number]
        block.watermark, block.owner, block.references = 0, owner, 0
        block.uses += 1
        return number

    def append(self, number: int, owner: int, num_tokens: int) -> bool:
        """`owner` wrote so many tokens after the watermark. True if that filled the block, which is then shared."""
        block = self._blocks[number]
        assert block.owner == owner, "only the owner appends"
        assert 0 < num_tokens <= self.block_size - block.watermark, "a block has so much room"
        block.watermark += num_tokens
        if block.watermark < self.block_size:
            return False
        block.owner, block.references = None, 1
        return True

    def claim(self, number: int, owner: int, num_tokens: int) -> Claim | None:
        """Continue the first `num_tokens` tokens of a partial block. None: a copy is needed and there is no room."""
        block = self._blocks[number]
        assert 0 < num_tokens <= block.watermark < self.block_size
        if block.owner is None and num_tokens == block.watermark and not block.copies:
            del self._idle[number]
            block.owner = owner
            return Claim(number, num_tokens)
        was_idle = number in self._idle
        if was_idle:
            del self._idle[number]  # not to be the block that makes room for its own copy
        target = self.open(owner)
        if target is None:
            if was_idle:
                self._idle[number] = None
            return None
        block.copies += 1
        return Claim(target, num_tokens, Copy(number, target, num_tokens))

    def copied(self, copy: Copy) -> None:
        """The copy is done, or was given up: the source may go."""
        source = self._blocks[copy.source]
        assert source.copies > 0
        source.copies -= 1
        self._settle(copy.source)

    def filled(self, copy: Copy, owner: int) -> None:
        """The copy's bytes are in place: they count."""
        target = self._blocks[copy.target]
        assert target.owner == owner
        assert target.watermark == 0
        target.watermark = copy.num_tokens

    def leave(self, number: int, owner: int) -> None:
        """The owner goes; what it wrote is kept, if anything."""
        block = self._blocks[number]
        assert block.owner == owner, "only the owner leaves a partial block"
        block.owner = None
        self._settle(number)

    # -- full -------------------------------------------------------------------------------------

    def share(self, number: int) -> None:
        """One more request reads a full block."""
        block = self._blocks[number]
        assert self.is_full(number), "a partial block has one owner and no readers"
        self._idle.pop(number, None)
        block.references += 1

    def release(self, number: int) -> None:
        """One request less reads it; without any it is kept until its room is needed."""
        block = self._blocks[number]
        assert block.references > 0
        block.references -= 1
        self._settle(number)

    # -- inside -----------------------------------------------------------------------------------

    def _settle(self, number: int) -> None:
        """Nobody uses the block any more: keep it as the most recently used, or free it if it holds nothing."""
        block = self._blocks[number]
        if block.owner is not None or block.references or block.copies:
            return
        if block.watermark:
            self._idle[number] = None
        else:
            self._free.append(number)

    def check_invariants(self) -> None:
        used = set()
        for number, block in enumerate(self._blocks):
            assert 0 <= block.watermark <= self.block_size
            if block.owner is not None:
                assert block.watermark < self.block_size, "a full block has no owner"
                assert block.references == 0, "a partial block is read by its owner alone"
            if block.references:
                assert block.watermark == self.block_size
            if block.owner is not None or block.references or block.copies:
                used.add(number)
        assert len(self._free) == len(set(self._free))
        assert not used & set(self._free)
        assert not used & set(self._idle)
        assert used | set(self._free) | set(self._idle) == set(range(self.num_blocks))
        assert len(used) + len(self._free) + len(self._idle) == self.num_blocks
        assert all(self._blocks[n].watermark for n in self._idle)
