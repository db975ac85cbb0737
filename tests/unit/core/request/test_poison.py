"""Prompts that instances died of are remembered for a while and within bounds (F38)."""

from __future__ import annotations

import pytest

from pdmesh.core.model import Tick
from pdmesh.core.request.events import LegFailed, LegLost
from pdmesh.core.request.poison import PoisonBook
from pdmesh.errors import EngineFailed, PoisonRequest
from tests.support.driven_request import Driven


@pytest.mark.fault("F38")
def test_a_prompt_that_killed_two_instances_is_poison_for_ten_minutes() -> None:
    book = PoisonBook(remember_s=600)
    book.add(b"x", [("d0", 1)], now=0.0)
    assert not book.is_poison(b"x", 1.0)
    book.add(b"x", [("d1", 1)], now=10.0)
    assert book.is_poison(b"x", 609.9)
    assert not book.is_poison(b"x", 610.0)
    assert len(book) == 0


@pytest.mark.fault("F38")
def test_a_death_that_several_requests_saw_counts_once() -> None:
    """Two choices of a call, or two clients with the same prompt, used the decode that died. If the
    decode dies again after its restart, that is another death.
    """
    book = PoisonBook()
    for now in range(5):
        book.add(b"x", [("d0", 1)], float(now))
    assert not book.is_poison(b"x", 5.0)
    book.add(b"x", [("d0", 2)], 5.0)
    assert book.is_poison(b"x", 5.0)


@pytest.mark.fault("F38")
def test_an_answer_clears_it_and_the_oldest_is_forgotten() -> None:
    book = PoisonBook(max_entries=2)
    for digest in (b"a", b"b", b"c"):
        book.add(digest, [("d0", 1), ("d1", 1)], now=0.0)
    assert [book.is_poison(d, 1.0) for d in (b"a", b"b", b"c")] == [False, True, True]
    book.clear(b"b")
    assert not book.is_poison(b"b", 1.0)
    book.clear(b"never seen")


@pytest.mark.fault("F38")
@pytest.mark.parametrize("death", ["lost", "engine died"])
def test_a_request_whose_instances_die_at_once_stops_after_two(death: str) -> None:
    driven = Driven()
    for _ in range(2):
        assert driven.error is None
        driven.decode(num_tokens=3)
        if death == "lost":
            driven.feed(LegLost(driven.key))
        else:
            driven.feed(LegFailed(driven.key, EngineFailed("x", reason="ENGINE_DIED")))
    assert driven.error is PoisonRequest
    assert driven.request.num_deaths == 2


@pytest.mark.fault("F38")
def test_silent_instances_do_not_count_as_deaths() -> None:
    driven = Driven()
    for _ in range(3):
        driven.decode(num_tokens=3)
        driven.now += 6.0
        driven.feed(Tick())
    assert driven.request.num_migrations == 3
    assert driven.request.num_deaths == 0
    assert driven.error is None


@pytest.mark.fault("F23", "F38")
def test_instances_beyond_a_cable_that_was_cut_do_not_count_as_deaths() -> None:
    """A host with a prefill and a decode is out of reach, so its sessions end by silence."""
    driven = Driven()
    for _ in range(3):
        driven.decode(num_tokens=3)
        driven.feed(LegLost(driven.key, was_silent=True))
    assert driven.request.num_migrations == 3
    assert driven.request.num_deaths == 0
    assert driven.error is None


@pytest.mark.fault("F38", "F7")
def test_a_request_that_ran_for_a_while_is_not_blamed_for_a_death() -> None:
    driven = Driven()
    for _ in range(3):
        driven.decode(num_tokens=40)
        driven.feed(LegLost(driven.key))
    assert driven.request.num_deaths == 0
    driven.decode(num_tokens=1000)
    driven.feed(Tick())
    assert driven.error is None


def test_each_loss_is_remembered_with_its_instance_and_cause() -> None:
    driven = Driven()
    driven.decode(num_tokens=3)
    lost = driven.request.decode_id
    driven.now += 1.0
    driven.feed(LegLost(driven.key))
    (loss,) = driven.request.losses
    assert loss.at == driven.now
    assert lost in loss.instance_ids
    assert (loss.cause, loss.num_emitted) == ("the instance was lost", len(driven.request.emitted))
