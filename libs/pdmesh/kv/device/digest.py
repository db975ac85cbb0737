"""A checksum of 128 bits for KV bytes, which a GPU computes as fast as it reads the bytes.

xxh3 would be slow on a GPU, because it carries a state from block to block. Here every word of 8
bytes is mixed with its place, and the results are added up. There are two sums modulo 2^64: a plain
sum and a sum weighted by place. The order of additions does not matter, so each program of a kernel
can add up its own words. A change of a single word always changes the plain sum. The checksum
protects against faults, not against forgers. The functions `mixed` and `weight` run in Triton and
in numpy.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pdmesh.kv.transport.base import ByteArray

WORD_BYTES: Final = 8
_MASK: Final = (1 << 64) - 1
_STEP_WORDS: Final = 8192  # words that numpy mixes at a time: they fit in the cache


# `mixed` and `weight` take uint64 values of numpy or of Triton, and wrap around. They have no
# annotations, because Triton would try to resolve them. The constants are from splitmix64.
def mixed(word, place):  # type: ignore[no-untyped-def]
    """The word's part in the plain sum.

    It is a bijection of the word that differs from place to place.
    """
    x = word ^ (place * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


def weight(place):  # type: ignore[no-untyped-def]
    """The place's factor in the weighted sum. It is odd, so that no change of a word is lost."""
    return place * 2 + 1


_MIXED: Final[Any] = mixed  # for typed callers
_WEIGHT: Final[Any] = weight


def digest(data: ByteArray) -> bytes:
    """The checksum (16 bytes) of bytes in host memory."""
    num_words = data.size // WORD_BYTES
    whole = np.ascontiguousarray(data[: num_words * WORD_BYTES])
    words: npt.NDArray[np.uint64] = _as_words(whole)
    plain = weighted = 0
    for first in range(0, num_words, _STEP_WORDS):
        sums = _sums(words[first : first + _STEP_WORDS], first)
        plain, weighted = plain + sums[0], weighted + sums[1]
    if rest := data[num_words * WORD_BYTES :].tobytes():
        last = np.frombuffer(rest.ljust(WORD_BYTES, b"\0"), "<u8")
        sums = _sums(last, num_words)
        plain, weighted = plain + sums[0], weighted + sums[1]
    return finished(plain, weighted, data.size)


def finished(plain: int, weighted: int, num_bytes: int) -> bytes:
    """The checksum from both sums and the length.

    The length distinguishes zeros at the end of the data from the padding of the last word.
    """
    a, b = (plain + num_bytes) & _MASK, (weighted ^ num_bytes) & _MASK
    return struct.pack("<QQ", a, b)


def _as_words(data: ByteArray) -> npt.NDArray[np.uint64]:
    if data.ctypes.data % WORD_BYTES:
        data = data.copy()
    return data.view("<u8")


def _sums(words: npt.NDArray[np.uint64], first: int) -> tuple[int, int]:
    place = np.arange(first, first + len(words), dtype=np.uint64)
    parts: Any = _MIXED(words, place)
    return int(parts.sum(dtype=np.uint64)), int((parts * _WEIGHT(place)).sum(dtype=np.uint64))
