"""Decides which heads of which source rank make up each destination rank's KV (S57).

Prefill and decode may have different numbers of ranks. A rank holds a run of the model's kv heads,
or one head of which several ranks keep copies. A destination pulls each head that it needs from one
source, straight into its own share. With equal numbers of ranks, rank i pulls only from rank i.
Every source gets at least one pull, if only to learn that its bytes are not needed. Otherwise its
staged range would stay taken until the lease ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class HeadRun:
    """Consecutive kv heads of the whole model."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Heads that one destination rank takes from one source rank.

    `count` 0: the pull only tells the source that this destination is done.
    """

    source_rank: int
    source_head: int  # among the source's own heads
    count: int
    head: int  # where they belong among the destination's own heads


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
    """What destination `rank` pulls, in the order of its heads; pieces without heads come last."""
    mine = heads_of(num_heads, num_destinations, rank)
    per_source = heads_of(num_heads, num_sources, 0).count
    copies = max(1, num_sources // num_heads)  # of each head, among the sources
    my_copy = rank % max(1, num_destinations // num_heads)
    found: list[Piece] = []
    head = mine.first
    while head < mine.first + mine.count:
        holder = head // per_source * copies  # the first rank that holds it
        offset = head % per_source
        count = min(per_source - offset, mine.first + mine.count - head)
        found.append(Piece(holder + my_copy % copies, offset, count, head - mine.first))
        head += count
    return (*found, *_words_only(num_heads, num_sources, num_destinations, rank, found))


def _words_only(
    num_heads: int, num_sources: int, num_destinations: int, rank: int, found: list[Piece]
) -> list[Piece]:
    """Pieces without heads: with them a head's first taker tells sources that their copies are
    not needed.
    """
    copies = max(1, num_sources // num_heads)
    takers = max(1, num_destinations // num_heads)  # destinations of each head
    if copies <= takers or rank % takers:
        return []
    return [
        Piece(piece.source_rank + copy, 0, 0, 0)
        for piece in found
        for copy in range(takers, copies)
    ]


@lru_cache(maxsize=64)
def num_takers(num_heads: int, num_sources: int, num_destinations: int, source_rank: int) -> int:
    """How many destination ranks will tell this source that they are done with it."""
    return sum(
        any(piece.source_rank == source_rank for piece in taken)
        for taken in (
            pieces(num_heads, num_sources, num_destinations, rank)
            for rank in range(num_destinations)
        )
    )
