"""What instances died of is remembered, for a while, and within bounds (F38)."""

from __future__ import annotations

import pytest

from pdmesh.core.model import Tick
from pdmesh.core.request.events import LegFailed, LegLost, RequestLimits
from pdmesh.core.request.poison import PoisonBook
from pdmesh.core.request.retry_budget import RetryBudget
from pdmesh.core.request.slo import ScenarioSlo, Slos
from pdmesh.errors import EngineFailed, Overloaded, PoisonRequest
from tests.support.driven_request import Driven


@pytest.mark.fault("F38")
def test_two_deaths_make_a_poison_for_ten_minutes() -> None:
    book = PoisonBook(remember_s=600)
    book.add(b"x", [("d0", 1)], now=0.0)
    assert not book.is_poison(b"x", 1.0)
    book.add(b"x", [("d1", 1)], now=10.0)
    assert book.is_poison(b"x", 609.9)
    assert not book.is_poison(b"x", 610.0)
    assert len(book) == 0


@pytest.mark.fault("F38")
def test_one_death_that_many_saw_is_one() -> None:
    """Two choices of a call, or two clients with one prompt, on the decode that died; a restart of
    it is another death.
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
def test_instances_that_say_nothing_are_not_held_against_a_request() -> None:
    driven = Driven()
    for _ in range(3):
        driven.decode(num_tokens=3)
        driven.now += 6.0
        driven.feed(Tick())
    assert driven.request.num_migrations == 3
    assert driven.request.num_deaths == 0
    assert driven.error is None


@pytest.mark.fault("F38", "F7")
def test_a_request_that_went_well_for_a_while_is_innocent_of_the_death() -> None:
    driven = Driven()
    for _ in range(3):
        driven.decode(num_tokens=40)
        driven.feed(LegLost(driven.key))
    assert driven.request.num_deaths == 0
    driven.decode(num_tokens=1000)
    driven.feed(Tick())
    assert driven.error is None


@pytest.mark.fault("F38")
def test_failures_that_are_no_death_are_bounded_by_the_budget_all_requests_share() -> None:
    budget = RetryBudget(ratio=0.0, reserve=5.0)
    requests = [Driven(budget) for _ in range(4)]
    num_moves = 0
    for driven in requests:
        while driven.error is None:
            driven.offer()
            driven.feed(LegFailed(driven.key, EngineFailed("x", reason="KV_TRANSFER_FAILED")))
        num_moves += driven.request.num_migrations
        assert driven.error is EngineFailed
    assert num_moves == 5


@pytest.mark.req("S44")
def test_an_instance_that_does_not_answer_does_not_hold_a_request_beyond_its_deadline() -> None:
    driven = Driven(ttft_s=0.5, answer_s=3.0)
    driven.offer()
    assert driven.request.wake_at == 0.5
    driven.now = 0.5
    driven.feed(Tick())
    assert driven.error is Overloaded


@pytest.mark.req("S9")
def test_the_deadline_is_by_scenario_and_by_length() -> None:
    limits = RequestLimits(ttft_s=10.0)
    slos = Slos(limits, 0.0, {"search": ScenarioSlo(0.5, 0.25, "busy")})
    assert slos.limits_for("", 8000) is limits, "free where nothing is configured"
    assert slos.limits_for("search", 2000).ttft_s == 1.0
    assert Slos(limits, 0.1).limits_for("any", 5000).ttft_s == 10.5
    assert (slos.default_text("search"), slos.default_text("any")) == ("busy", None)
    assert (slos.label("search"), slos.label("x" * 200)) == ("search", "default")
