"""Finds earlier places of a text's last tokens, in the same number of steps for any text length.

The index has one hash table for each length of n-gram. A table links the positions at which n-grams
with the same hash end, from the latest back to the first. The n-gram at the end of the text is
entered only when its next token is known, so a search does not find this n-gram itself. numpy
enters a whole new text at once. Later tokens are entered one by one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import mul
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Tokens = Sequence[int] | NDArray[np.int32]

SIZES: Final = (4, 2)  # lengths of n-grams, in tokens; the first length with a match is used
MAX_LINKS: Final = 16  # one search follows at most this many links in a table
_FEW: Final = 64  # up to this many tokens are entered one by one, which is faster than numpy
_LEAST_BITS: Final = 8  # a table's hashes have at least this many bits
_FACTORS: Final = (  # odd numbers of 64 random bits
    0x9E3779B97F4A7C15,
    0xD1B54A32D192ED03,
    0xABC98388FB8FAC03,
    0x8CB92BA72F3D8DD7,
)
_WORD: Final = (1 << 64) - 1
_NONE: Final = -1


class NgramIndex:
    """A text that grows, and its index. At least the last `max_tokens` of the text are kept.

    At most twice as many are kept if `max_tokens` is a power of two, else up to four times as many.

    `num_steps` counts the work: entries made, links followed and tokens scanned.
    """

    def __init__(self, text: Tokens, max_tokens: int) -> None:
        self.num_forgotten = 0  # how many tokens at the beginning are no longer kept
        self.num_steps = 0
        self._text = array("i")
        self._max_tokens = max_tokens
        self._tables = [_Table(size) for size in SIZES]
        self.extend(text)

    def __len__(self) -> int:
        """The text's length, including forgotten tokens, so that positions never change."""
        return self.num_forgotten + len(self._text)

    @property
    def num_bytes(self) -> int:
        tables = sum(len(table.heads) + len(table.before) for table in self._tables)
        return self._text.itemsize * (len(self._text) + tables)

    def at(self, position: int) -> int:
        return self._text[position - self.num_forgotten]

    def part(self, begin: int, end: int) -> array[int]:
        """The text between two positions, as far as it exists."""
        return self._text[begin - self.num_forgotten : end - self.num_forgotten]

    def find(self, token: int, begin: int, end: int) -> int | None:
        """The first position from `begin` to `end - 1` that has the token."""
        offset = self.num_forgotten
        begin = max(0, begin - offset)
        end = max(begin, min(end - offset, len(self._text)))
        self.num_steps += end - begin
        try:
            return self._text.index(token, begin, end) + offset
        except ValueError:
            return None

    def extend(self, tokens: Tokens) -> None:
        if len(tokens) > _FEW:
            self._text.frombytes(np.asarray(tokens, dtype=np.int32).tobytes())
            self._rebuild()
            return
        for token in tokens:
            self._text.append(token)
            self._enter()
        if len(self._text) > self._tables[0].capacity:
            self._rebuild()

    def next_after(self, near: int | None = None) -> int | None:
        """The position after an earlier place of the longest n-gram that ends the text.

        Without `near`, this is the latest such place. With `near`, it is the one of the `MAX_LINKS`
        latest places that is nearest to `near`.
        """
        for table in self._tables:
            found = self._place(table, near)
            if found is not None:
                return found
        return None

    def _place(self, table: _Table, near: int | None) -> int | None:
        text, size, offset = self._text, table.size, self.num_forgotten
        if len(text) <= size:
            return None
        wanted, best = text[-size:], None
        end = table.heads[_bucket(wanted, table.shift)]
        for _ in range(MAX_LINKS):
            if end == _NONE:
                break
            self.num_steps += 1
            if text[end - size : end] == wanted:
                found = end + offset
                if near is None:
                    return found
                if best is None or abs(found - near) < abs(best - near):
                    best = found
            end = table.before[end]
        return best

    def _enter(self) -> None:
        """Enter the n-grams that end before the last token."""
        end = len(self._text) - 1
        for table in self._tables:
            table.enter(self._text, end)
            self.num_steps += 1

    def _rebuild(self) -> None:
        """Fill the tables from the text, with room for more tokens, so that this happens rarely.

        If the text is too long, its beginning is forgotten.
        """
        if len(self._text) > 2 * self._max_tokens:
            num_surplus = len(self._text) - self._max_tokens
            del self._text[:num_surplus]
            self.num_forgotten += num_surplus
        text = np.array(self._text, dtype=np.int32)
        for table in self._tables:
            table.fill(text)
        self.num_steps += len(SIZES) * len(text)


class _Table:
    """A hash table of n-grams of one length.

    `heads` has, for each hash, the end of the latest n-gram. `before` has, for the end of each
    n-gram, the end of the n-gram before it with the same hash.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.fill(np.empty(0, dtype=np.int32))

    @property
    def capacity(self) -> int:
        """How many tokens of text fit before the table should be filled again."""
        return len(self.heads)

    def enter(self, text: array[int], end: int) -> None:
        self.before.append(_NONE)
        if end >= self.size:
            bucket = _bucket(text[end - self.size : end], self.shift)
            self.before[end], self.heads[bucket] = self.heads[bucket], end

    def fill(self, text: NDArray[np.int32]) -> None:
        """Enter all n-grams except the last one, whose next token is not known."""
        num_bits = max(_LEAST_BITS, len(text).bit_length())
        self.shift = 64 - num_bits
        heads = np.full(1 << num_bits, _NONE, dtype=np.int32)
        before = np.full(len(text), _NONE, dtype=np.int32)
        if len(text) > self.size:
            buckets = _buckets(text[:-1], self.size, self.shift)
            ordered = buckets << 32 | np.arange(self.size, len(text))
            ordered.sort()
            buckets, ends = ordered >> 32, ordered & 0xFFFFFFFF
            follows = buckets[1:] == buckets[:-1]
            before[ends[1:][follows]] = ends[:-1][follows]
            is_last = np.append(~follows, True)
            heads[buckets[is_last]] = ends[is_last]
        self.heads, self.before = array("i", heads.tobytes()), array("i", before.tobytes())


def _bucket(ngram: Sequence[int], shift: int) -> int:
    """The hash of one n-gram, the same as in `_buckets`."""
    mixed: int = sum(map(mul, ngram, _FACTORS))
    return (mixed & _WORD) >> shift


def _buckets(text: NDArray[np.int32], size: int, shift: int) -> NDArray[Any]:
    """The hashes of all n-grams, as 64-bit numbers.

    The type has Any because numpy's names for 64-bit types differ by platform.
    """
    num = len(text) - size + 1
    mixed, tokens = np.zeros(num, dtype=np.uint64), text.astype(np.uint64)
    for n in range(size):
        mixed += tokens[n : n + num] * np.uint64(_FACTORS[n])
    return (mixed >> np.uint64(shift)).astype(np.int64)
