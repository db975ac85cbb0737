"""A prefill stops fetching image embeddings from an encoder for a while after repeated failures."""

from __future__ import annotations

import itertools

import pytest

from pdmesh.core.images.avoided_encoders import AVOIDED_S, LIMIT, MAX_SOURCES, AvoidedEncoders
from pdmesh.core.kv.transfer.ticket import PullFailure, Refusal
from pdmesh.core.model import PeerId

pytestmark = [pytest.mark.req("S130"), pytest.mark.fault("F34")]

SOURCE, OTHER = PeerId("encoder-0", 1), PeerId("encoder-1", 1)
BEGAN = 1000.0


def failing(num: int = LIMIT, source: PeerId = SOURCE) -> AvoidedEncoders:
    sources = AvoidedEncoders()
    for _ in range(num):
        assert sources.may_fetch(source, BEGAN)
        sources.failed(source, PullFailure.TIMEOUT, BEGAN)
    return sources


def test_after_failures_in_a_row_nobody_fetches_for_a_while() -> None:
    sources = failing()
    for now in (BEGAN, BEGAN + AVOIDED_S - 0.1):
        assert not sources.may_fetch(SOURCE, now)
        assert sources.avoided(now) == [SOURCE]
    assert sources.may_fetch(OTHER, BEGAN)
    assert sources.may_fetch(PeerId(SOURCE.instance_id, 2), BEGAN), "a successor is another source"


def test_a_success_between_failures_clears_the_record() -> None:
    sources = failing(LIMIT - 1)
    assert sources.avoided(BEGAN) == []
    sources.fetched(SOURCE)
    sources.failed(SOURCE, PullFailure.TIMEOUT, BEGAN)
    assert sources.may_fetch(SOURCE, BEGAN)
    assert len(sources) == 1


def test_the_failure_that_begins_it_says_so_once() -> None:
    sources = AvoidedEncoders()
    told = [sources.failed(SOURCE, PullFailure.CONNECT, BEGAN) for _ in range(LIMIT + 2)]
    assert told == [False] * (LIMIT - 1) + [True, False, False]


def test_then_one_prompt_tries_again_and_the_others_wait_for_its_outcome() -> None:
    sources, now = failing(), BEGAN + AVOIDED_S
    assert sources.avoided(now) == []
    assert [sources.may_fetch(SOURCE, now) for _ in range(3)] == [True, False, False]
    assert sources.avoided(now) == [SOURCE]
    sources.failed(SOURCE, PullFailure.TIMEOUT, now + 4)
    assert not sources.may_fetch(SOURCE, now + AVOIDED_S)
    now += 4 + AVOIDED_S
    assert sources.may_fetch(SOURCE, now)
    sources.fetched(SOURCE)
    assert all(sources.may_fetch(SOURCE, now) for _ in range(3))
    assert len(sources) == 0


def test_a_try_whose_prompt_is_aborted_costs_only_time() -> None:
    sources, now = failing(), BEGAN + AVOIDED_S
    assert sources.may_fetch(SOURCE, now)
    assert not sources.may_fetch(SOURCE, now + AVOIDED_S - 0.1)
    assert sources.may_fetch(SOURCE, now + AVOIDED_S)


@pytest.mark.parametrize(
    "reason",
    [PullFailure.BUSY, PullFailure.CLOSING, f"KV_REFUSED_{Refusal.TOO_MANY_PULLS.name}"],
)
def test_what_says_nothing_about_the_path_does_not_count(reason: str) -> None:
    sources = AvoidedEncoders()
    for _ in range(2 * LIMIT):
        assert not sources.failed(SOURCE, reason, BEGAN)
        assert sources.may_fetch(SOURCE, BEGAN)
    assert len(sources) == 0


def test_only_so_many_sources_are_remembered() -> None:
    """Beyond MAX_SOURCES, the source that failed longest ago is forgotten."""
    sources = failing()
    others = (PeerId("encoder-1", incarnation) for incarnation in itertools.count(1))
    for other in itertools.islice(others, MAX_SOURCES - 1):
        sources.failed(other, PullFailure.TIMEOUT, BEGAN + 1)
    assert not sources.may_fetch(SOURCE, BEGAN + 1)
    sources.failed(next(others), PullFailure.TIMEOUT, BEGAN + 1)
    assert len(sources) == MAX_SOURCES
    assert sources.may_fetch(SOURCE, BEGAN + 1)
