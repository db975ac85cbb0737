"""A prompt is pulled from several ranks in pieces.

The tests cover where each piece is written, and when the whole pull ends.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.instance.arena import ArenaRange
from pdmesh.core.kv.layout.rank_heads import heads_of
from pdmesh.core.kv.layout.rank_place import RankPlace
from pdmesh.core.kv.transfer.ticket import Ticket
from pdmesh.engine.vllm.connector.worker.piece_pulls import PiecePull, Share, TogetherPull
from pdmesh.errors import KvTransferFailed
from pdmesh.kv.agent.types import PullResult

TICKET = Ticket("t", "r", 0, "prefill-0", 7, "fp", 8, 1 << 20, ("a",), 5000)
LANDING = ArenaRange(4096, 1 << 20)


def of_ranks(num: int) -> Ticket:
    return replace(TICKET, addresses=tuple(f"a{i}" for i in range(num)))


@pytest.mark.req("S57")
@given(st.sampled_from((1, 2, 4, 8)), st.sampled_from((1, 2, 4, 8)), st.sampled_from((1, 2, 4, 8)))
def test_pieces_tile_the_landing_range_and_have_different_offsets(
    num_heads: int, num_sources: int, num_ranks: int
) -> None:
    for rank in range(num_ranks):
        num_bytes = 64 * max(1, num_heads // num_ranks)
        share = Share(num_heads, RankPlace(rank, num_ranks))
        found = share.pieces(of_ranks(num_sources), LANDING, num_bytes)
        offsets = [piece.landing.offset for piece in found]
        assert len(set(offsets)) == len(found), "the agent names a freed landing by its offset"
        carrying = [piece for piece in found if piece.count]
        at, head = LANDING.offset, 0
        for piece in carrying:
            assert piece.landing.offset == at
            assert piece.here in (None, (head, piece.count))
            at, head = at + piece.num_bytes, head + piece.count
        assert at == LANDING.offset + num_bytes
        assert len(carrying) == 1 or num_sources != num_ranks
        if num_sources == num_ranks:
            assert found[0].heads is None
            assert found[0].source_rank == rank


@pytest.mark.req("S57", "S120")
@given(
    st.sampled_from([(), (2, 2), (3, 2), (1, 2, 1)]),
    st.sampled_from((1, 2, 4, 8)),
    st.sampled_from((1, 2, 4, 8)),
    st.sampled_from((1, 2, 4, 8)),
)
def test_every_rank_gets_each_head_of_each_of_its_layers_once_and_every_source_is_told(
    stages: tuple[int, ...], num_heads: int, at_source: int, here: int
) -> None:
    """`at_source` and `here` are numbers of ranks per stage. Only the stage of a layer has its
    KV.
    """
    num_stages, num_layers = max(1, len(stages)), stages or (2,)
    ticket = of_ranks(at_source * num_stages)
    told: dict[int, int] = {}
    for rank in range(here * num_stages):
        place = RankPlace(rank, here * num_stages, stages)
        share = Share(num_heads, place)
        num_mine = max(1, num_heads // here)
        num_bytes = 64 * num_mine * num_layers[place.stage]
        found = share.pieces(ticket, LANDING, num_bytes)
        assert {piece.source_rank for piece in found} == set(share.sources(len(ticket.addresses)))
        got: list[tuple[int, int]] = []  # (head of the model, head on this rank)
        for piece in found:
            source = RankPlace(piece.source_rank, at_source * num_stages, stages)
            assert source.stage == place.stage, "it has other layers"
            told[piece.source_rank] = told.get(piece.source_rank, 0) + 1
            theirs = heads_of(num_heads, at_source, source.rank_in_stage)
            first, count = piece.heads or (0, theirs.count if piece.count else 0)
            to = (piece.here or (0, count))[0]
            got += [(theirs.first + first + i, to + i) for i in range(count)]
        mine = heads_of(num_heads, here, place.rank_in_stage)
        assert sorted(got) == [(mine.first + i, i) for i in range(mine.count)]
        assert sum(piece.num_bytes for piece in found) == num_bytes
    assert set(told) == set(range(at_source * num_stages)), "an untold source keeps its range"


def test_a_wholly_cached_prompt_still_has_a_place_for_each_acknowledgement() -> None:
    found = Share(4, RankPlace(0, 1)).pieces(of_ranks(4), LANDING, 0)
    assert [piece.source_rank for piece in found] == [0, 1, 2, 3]
    assert len({piece.landing.offset for piece in found}) == 4


def together(*sizes: int) -> tuple[TogetherPull, list[Future[Any]], list[str]]:
    pulls: list[Future[Any]] = [Future() for _ in sizes]
    pieces = [
        PiecePull(i, ArenaRange(100 * i, n), n, None, None, 1, 1) for i, n in enumerate(sizes)
    ]
    told: list[str] = []
    whole = TogetherPull(list(zip(pieces, pulls, strict=True)))
    whole.start(lambda: told.append("over"))
    return whole, pulls, told


def came(pull: Future[Any], num_bytes: int) -> None:
    pull.set_running_or_notify_cancel()
    pull.set_result(PullResult(num_bytes, 0.0))


def test_a_pull_is_over_with_its_last_piece() -> None:
    whole, (first, second), told = together(10, 20)
    came(second, 20)
    assert told == []
    came(first, 10)
    assert told == ["over"]
    assert whole.error() is None
    assert [piece.landing.offset for piece in whole.arrived] == [0, 100]


@pytest.mark.fault("F2")
def test_one_failure_cancels_the_others_and_waits_for_them() -> None:
    whole, (first, second, third), told = together(10, 20, 30)
    came(first, 10)
    # its bytes are on their way, so this pull ends only after they arrive
    third.set_running_or_notify_cancel()
    second.set_exception(KvTransferFailed("gone", reason="KV_PEER_LOST"))
    assert told == []
    third.set_result(PullResult(30, 0.0))
    assert told == ["over"]
    error = whole.error()
    assert isinstance(error, KvTransferFailed)
    assert error.reason == "KV_PEER_LOST"
    assert [piece.landing.offset for piece in whole.arrived] == [0, 200]


def test_a_piece_of_another_size_is_a_failure() -> None:
    whole, (pull,), _ = together(10)
    came(pull, 8)
    error = whole.error()
    assert isinstance(error, KvTransferFailed)
    assert error.reason == "KV_PROTOCOL_ERROR"


def test_a_task_that_is_cancelled_before_it_begins_ends_at_once() -> None:
    whole, pulls, told = together(10, 20)
    whole.cancel()
    assert told == ["over"]
    assert all(pull.cancelled() for pull in pulls)
    assert whole.error() is not None
    assert whole.arrived == []
