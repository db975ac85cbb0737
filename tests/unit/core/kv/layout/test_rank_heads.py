"""Tests which heads each rank holds, and which heads a rank pulls from each source rank."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.kv.layout.rank_heads import (
    HeadRun,
    heads_of,
    num_takers,
    pieces,
)

RANKS = (1, 2, 4, 8)


@st.composite
def meetings(draw: st.DrawFn) -> tuple[int, int, int]:
    """The numbers of KV heads, source ranks and destination ranks.

    MHA and GQA need no distinction, because only KV heads count.
    """
    heads = draw(st.sampled_from((1, 2, 4, 8, 16, 32)))
    return heads, draw(st.sampled_from(RANKS)), draw(st.sampled_from(RANKS))


@pytest.mark.req("S57")
def test_ranks_share_heads_or_keep_copies() -> None:
    assert [heads_of(8, 4, r) for r in range(4)] == [HeadRun(2 * r, 2) for r in range(4)]
    assert [heads_of(2, 4, r).first for r in range(4)] == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="do not divide"):
        heads_of(3, 2, 0)
    with pytest.raises(IndexError):
        heads_of(4, 2, 2)


@pytest.mark.req("S57")
@given(meetings())
def test_every_head_arrives_once_from_a_rank_that_holds_it(meeting: tuple[int, int, int]) -> None:
    heads, sources, destinations = meeting
    for rank in range(destinations):
        mine = heads_of(heads, destinations, rank)
        arrived: list[int] = []
        for piece in pieces(heads, sources, destinations, rank):
            held = heads_of(heads, sources, piece.source_rank)
            assert piece.source_head + piece.count <= held.count
            assert piece.head == len(arrived) or not piece.count
            first = held.first + piece.source_head
            arrived += range(first, first + piece.count)
        assert arrived == list(range(mine.first, mine.first + mine.count))


@pytest.mark.req("S57")
@given(meetings())
def test_every_source_gets_a_message_from_as_many_ranks_as_it_waits_for(
    meeting: tuple[int, int, int],
) -> None:
    heads, sources, destinations = meeting
    told = Counter(
        source
        for rank in range(destinations)
        for source in {p.source_rank for p in pieces(heads, sources, destinations, rank)}
    )
    assert set(told) == set(range(sources)), "a source that gets no message never frees its bytes"
    for source in range(sources):
        assert told[source] == num_takers(heads, sources, destinations, source)


@pytest.mark.req("S57")
@given(st.sampled_from((1, 2, 4, 8, 32)), st.sampled_from(RANKS))
def test_with_equal_numbers_of_ranks_each_pulls_only_from_its_counterpart(
    heads: int, ranks: int
) -> None:
    for rank in range(ranks):
        (piece,) = pieces(heads, ranks, ranks, rank)
        assert (piece.source_rank, piece.source_head, piece.head) == (rank, 0, 0)
        assert piece.count == heads_of(heads, ranks, rank).count
