"""Decides which partly filled block a prompt can continue, and whether in place or in a copy (S103,
S104).

A full block is shared and never changes. A partial block holds tokens up to its watermark. It is
exclusive: one request at a time takes it over and appends after the watermark. A request that
continues only its beginning, or finds it taken, gets a copy of that beginning in a block of its
own. Appending does not change what is below the watermark, so a block may be copied while its owner
appends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdmesh.core.kv.prefix.partial_block_names import PartialSampling, partial_names


@dataclass(frozen=True, slots=True)
class PartialFound:
    """The first `num_tokens` tokens of `block` are the beginning of the wanted tokens."""

    block: int
    num_tokens: int


@dataclass(slots=True)
class _Tail:
    parent: bytes
    watermark: int
    names: dict[int, bytes]


@dataclass(slots=True)
class PartialBlocks:
    """Partial blocks by block number.

    Of several blocks with equal beginnings, the one that was kept last is found.
    """

    sampling: PartialSampling
    block_size: int
    _partials: dict[int, _Tail] = field(default_factory=dict)
    _block_at: dict[bytes, int] = field(default_factory=dict)
    _counts: dict[bytes, dict[int, int]] = field(default_factory=dict)  # parent -> position

    def __len__(self) -> int:
        return len(self._partials)

    def __contains__(self, block: int) -> bool:
        return block in self._partials

    def keep(self, block: int, root: bytes, parent: bytes, data: bytes) -> list[bytes]:
        """`block` holds the tokens `data` after those that `parent` names.

        Returns the new names.
        """
        assert block not in self._partials
        watermark = len(data) // 4
        assert 0 < watermark <= self.block_size
        positions = [p for p in self.sampling.positions(watermark) if p < self.block_size]
        if not positions:
            return []
        names = partial_names(root, parent, data, positions)
        self._partials[block] = _Tail(parent, watermark, names)
        counts = self._counts.setdefault(parent, {})
        new = []
        for position, name in names.items():
            counts[position] = counts.get(position, 0) + 1
            if name not in self._block_at:
                new.append(name)
            self._block_at[name] = block
        return new

    def forget(self, block: int) -> list[bytes]:
        """The block's content is given up, or gets other names.

        Returns the names that no block has any more.
        """
        tail = self._partials.pop(block, None)
        if tail is None:
            return []
        counts = self._counts[tail.parent]
        gone = []
        for position, name in tail.names.items():
            counts[position] -= 1
            if not counts[position]:
                del counts[position]
            if self._block_at.get(name) == block:
                del self._block_at[name]
                gone.append(name)
        if not counts:
            del self._counts[tail.parent]
        return gone

    def find(self, root: bytes, parent: bytes, data: bytes) -> PartialFound | None:
        """The block that follows `parent` and holds the longest beginning of `data`."""
        most = len(data) // 4
        positions = sorted(p for p in self._counts.get(parent, ()) if p <= most)
        if not positions:
            return None
        names = partial_names(root, parent, data, positions)
        for position in reversed(positions):
            block = self._block_at.get(names[position])
            if block is not None:
                return PartialFound(block, position)
        return None

    def may_append(self, found: PartialFound) -> bool:
        """Whether a request that has the block to itself may append to it.

        If not, the request may only continue a copy of what was found.
        """
        watermark = self._partials[found.block].watermark
        return found.num_tokens == watermark < self.block_size

    def check_invariants(self) -> None:
        names = {name for tail in self._partials.values() for name in tail.names.values()}
        assert set(self._block_at) <= names
        for name, block in self._block_at.items():
            assert name in self._partials[block].names.values()
        counts: dict[bytes, dict[int, int]] = {}
        for tail in self._partials.values():
            assert 0 < tail.watermark <= self.block_size
            for position in tail.names:
                of_parent = counts.setdefault(tail.parent, {})
                of_parent[position] = of_parent.get(position, 0) + 1
        assert counts == self._counts
