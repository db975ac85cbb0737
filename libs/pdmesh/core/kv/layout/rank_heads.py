"""Decides from which source ranks a destination rank pulls which KV heads (S57).

Prefill (the source) and decode (the destination) may have different numbers of ranks. A rank holds
consecutive KV heads of the model, or a copy of one head that other ranks hold too. A destination
pulls each head that it needs from one source. With equal numbers of ranks, rank i pulls only from
rank i. A source whose copies are not needed gets a pull without heads. This empty pull tells the
source that it may release its buffer. Without it, the source would keep the buffer until the
ticket's lease ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class HeadRun:
    """Consecutive KV heads of the whole model."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Heads that one destination rank takes from one source rank.

    A `count` of 0 means an empty pull, which only tells the source that this destination is done.
    """

    source_rank: int
    source_head: int  # among the source's own heads
    count: int
    head: int  # where the first of these heads is among the destination's own heads


def heads_of(num_heads: int, num_ranks: int, rank: int) -> HeadRun:
    """The heads that a rank holds.

    Raises ValueError if the ranks cannot share the heads equally, IndexError if there is no such
    rank.
    """
    if num_heads < 1 or num_ranks < 1:
        raise ValueError(f"needs a kv head and a rank: {num_heads} heads, {num_ranks} ranks")
    if not 0 <= rank < num_ranks:
        raise IndexError(f"no rank {rank} of {num_ranks}")
    if num_heads % num_ranks == 0:
        count = num_heads // num_ranks
        return HeadRun(rank * count, count)
    if num_ranks % num_heads == 0:
        return HeadRun(rank // (num_ranks // num_heads), 1)
    raise ValueError(f"{num_heads} kv heads do not divide over {num_ranks} ranks")


@lru_cache(maxsize=64)
def pieces(num_heads: int, num_sources: int, num_destinations: int, rank: int) -> tuple[Piece, ...]:
    """What destination `rank` pulls, in the order of its heads. Empty pulls come last."""
    mine = heads_of(num_heads, num_destinations, rank)
    per_source = heads_of(num_heads, num_sources, 0).count
    copies = max(1, num_sources // num_heads)  # how many sources hold each head
    my_copy = rank % max(1, num_destinations // num_heads)
    found: list[Piece] = []
    head = mine.first
    while head < mine.first + mine.count:
        holder = head // per_source * copies  # the first rank that holds the head
        offset = head % per_source
        count = min(per_source - offset, mine.first + mine.count - head)
        found.append(Piece(holder + my_copy % copies, offset, count, head - mine.first))
        head += count
    return (*found, *_words_only(num_heads, num_sources, num_destinations, rank, found))


def _words_only(
    num_heads: int, num_sources: int, num_destinations: int, rank: int, found: list[Piece]
) -> list[Piece]:
    """The empty pulls, which tell sources with unused copies to release their buffers.

    If several destinations take the same heads, only the first sends empty pulls.
    """
    copies = max(1, num_sources // num_heads)
    takers = max(1, num_destinations // num_heads)  # how many destinations take each head
    if copies <= takers or rank % takers:
        return []
    return [
        Piece(piece.source_rank + copy, 0, 0, 0)
        for piece in found
        for copy in range(takers, copies)
    ]


@lru_cache(maxsize=64)
def num_takers(num_heads: int, num_sources: int, num_destinations: int, source_rank: int) -> int:
    """How many destination ranks will tell this source rank that they are done with its KV."""
    return sum(
        any(piece.source_rank == source_rank for piece in taken)
        for taken in (
            pieces(num_heads, num_sources, num_destinations, rank)
            for rank in range(num_destinations)
        )
    )
