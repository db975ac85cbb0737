"""Decides which bytes of an arena a request uses: the first free range that is long enough.

An arena is memory that is mapped and registered with the transport once, for KV transfers. Requests
only reserve ranges of it (S49). Ranges are aligned, so that two requests never share a page or a
cache line. Free neighbours are merged.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ArenaRange:
    """Bytes that are reserved in a KV arena. The range is the same in the arena of each rank."""

    offset: int
    length: int


class ArenaAllocator:
    """Reserves ranges of an arena of `size` bytes.

    `align` is a power of two, such as 4096 for pages or 64 for cache lines.
    """

    def __init__(self, size: int, align: int = 4096) -> None:
        if align < 1 or align & (align - 1):
            raise ValueError(f"align must be a power of two, not {align}")
        if size < 0:
            raise ValueError(f"size must not be negative, is {size}")
        self._align = align
        self._size = size - size % align
        self._free_offsets: list[int] = [0] if self._size else []  # ascending
        self._free_lengths: list[int] = [self._size] if self._size else []
        self._reserved: dict[int, ArenaRange] = {}  # by offset
        self._bytes_used = 0

    @property
    def size(self) -> int:
        """Bytes that can be reserved: the size asked for, rounded down to the alignment."""
        return self._size

    @property
    def bytes_used(self) -> int:
        """Reserved bytes, the padding of each range included."""
        return self._bytes_used

    @property
    def num_ranges(self) -> int:
        return len(self._reserved)

    def reserve(self, length: int) -> ArenaRange | None:
        """Reserve the first free range of at least `length` bytes. None if there is none.

        The `length` of the result is the given one, without padding.
        """
        if length <= 0:
            raise ValueError(f"a range must have at least one byte, not {length}")
        padded = self._pad(length)
        for index, free in enumerate(self._free_lengths):
            if free >= padded:
                return self._take(index, length, padded)
        return None

    def free(self, r: ArenaRange) -> None:
        """Give a reserved range back. Raises ValueError if the range is not reserved."""
        if self._reserved.get(r.offset) != r:
            raise ValueError(f"{r} is not reserved")
        del self._reserved[r.offset]
        padded = self._pad(r.length)
        self._bytes_used -= padded
        self._give_back(r.offset, padded)

    def check_invariants(self) -> None:
        """Free and reserved ranges cover the arena, and no two neighbours are both free."""
        spans = [(o, n, True) for o, n in zip(self._free_offsets, self._free_lengths, strict=True)]
        spans += [(o, self._pad(r.length), False) for o, r in self._reserved.items()]
        end, was_free = 0, False
        for offset, length, is_free in sorted(spans):
            assert offset == end
            assert length > 0
            assert offset % self._align == 0
            assert not (is_free and was_free), "two free neighbours were not merged"
            end, was_free = offset + length, is_free
        assert end == self._size
        assert self._bytes_used == self._size - sum(self._free_lengths)

    def _pad(self, length: int) -> int:
        return -(-length // self._align) * self._align

    def _take(self, index: int, length: int, padded: int) -> ArenaRange:
        taken = ArenaRange(self._free_offsets[index], length)
        self._free_offsets[index] += padded
        self._free_lengths[index] -= padded
        if not self._free_lengths[index]:
            del self._free_offsets[index], self._free_lengths[index]
        self._reserved[taken.offset] = taken
        self._bytes_used += padded
        return taken

    def _give_back(self, offset: int, padded: int) -> None:
        index = bisect_left(self._free_offsets, offset)
        if index < len(self._free_offsets) and self._free_offsets[index] == offset + padded:
            padded += self._free_lengths[index]
            del self._free_offsets[index], self._free_lengths[index]
        before = index - 1
        if before >= 0 and self._free_offsets[before] + self._free_lengths[before] == offset:
            self._free_lengths[before] += padded
            return
        self._free_offsets.insert(index, offset)
        self._free_lengths.insert(index, padded)
