"""One prompt pulled from several ranks: where each piece lands, and when the whole pull is over."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.instance.arena import ArenaRange
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
        share = Share(num_heads, num_ranks, rank)
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


def test_a_wholly_cached_prompt_still_has_a_place_for_each_acknowledgement() -> None:
    found = Share(4, 1, 0).pieces(of_ranks(4), LANDING, 0)
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
    third.set_running_or_notify_cancel()  # its bytes are on their way: it ends after they arrive
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
